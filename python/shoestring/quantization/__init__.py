"""Quantisation of weights and of optimizer state to 4 and 8 bits."""
