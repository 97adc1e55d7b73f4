"""Replaces the CPU kernel of an operator in a test, to make calls fail or wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced(operator: str, around: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Within this context manager, ``around(call)`` runs in place of the CPU kernel of ``operator``.

    ``call()`` runs the kernel with the arguments of the operator.
    """
    kernel = torch.library.get_kernel(f"shoestring::{operator}", "CPU")

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return around(lambda: kernel.call_boxed(keys, *args, **kwargs))

    library = torch.library.Library("shoestring", "IMPL")
    try:
        library.impl(operator, run, "CPU", with_keyset=True, allow_override=True)
        yield
    finally:
        library._destroy()
