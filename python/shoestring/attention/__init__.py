"""Attention with memory linear in the number of tokens."""
