"""Helpers that the other subpackages use: errors, classes of single instances, storages of tensors."""
