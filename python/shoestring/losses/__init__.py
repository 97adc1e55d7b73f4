"""Cross-entropy of logits, and cross-entropy and distillation losses of a linear layer's output.

The losses of a linear layer never store all of its logits.
"""
