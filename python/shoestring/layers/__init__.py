"""Embeddings, norms, rotary embeddings, gated activations and dropout."""
