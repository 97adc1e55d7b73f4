"""The operators as Python functions: thin over torch.ops.shoestring, each with a readable reference beside it."""

from shoestring.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]
