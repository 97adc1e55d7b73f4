"""Let one thread at a time run functions that change the same things."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
LOCK = "_one_thread"  # name of the attribute that holds an object's lock


def holding(lock: AbstractContextManager[Any]) -> Callable[[Function], Function]:
    """Return a decorator that lets a function wait for a lock and hold it."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return function(*args, **kwargs)

        return cast(Function, waiting)

    return decorate


def one_thread(method: Function) -> Function:
    """Let a method wait while another thread is in a method of the same object that has this decorator, too."""

    @functools.wraps(method)
    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.__dict__.setdefault(LOCK, threading.RLock()):
            return method(self, *args, **kwargs)

    return cast(Function, waiting)
