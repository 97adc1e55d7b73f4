"""Run functions in threads."""

import threading
from collections.abc import Callable
from typing import Any


def together(*functions: Callable[[], Any], timeout: float = 60) -> None:
    """Run functions in threads of their own, and raise what one of them raises."""
    errors: list[BaseException] = []

    def run(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
