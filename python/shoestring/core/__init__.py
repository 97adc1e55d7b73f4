"""Helpers of the other subpackages: errors, changes of single modules, and sizes of tensor storages."""
