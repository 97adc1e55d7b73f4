"""Weights and optimizer state in 4 and 8 bits."""
