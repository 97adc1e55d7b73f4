"""Compute the memory and traffic of a training step without running it."""
