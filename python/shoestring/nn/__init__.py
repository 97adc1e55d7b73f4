"""Modules: drop-in counterparts of torch.nn's."""

from shoestring.nn.linear_4bit import Linear4bit

__all__ = ["Linear4bit"]
