"""The operators in plain PyTorch, with which tests and benchmarks compare. Each room has a module."""
