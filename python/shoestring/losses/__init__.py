"""Cross-entropy and distillation, of logits and of linear layers."""
