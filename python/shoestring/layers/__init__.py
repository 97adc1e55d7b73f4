"""Norms, rotary embeddings, gated activations and dropout."""
