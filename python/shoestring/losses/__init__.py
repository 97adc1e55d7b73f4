"""Cross-entropy of logits, and cross-entropy and distillation of linear layers without storing the logits."""
