"""Run a task in a forked child process."""

import os
import signal
import time
import traceback
from collections.abc import Callable

import torch


def in_child(task: Callable[[], None], seconds: float = 60) -> None:
    """Run a task in a forked child process. Fail if the child does not end within ``seconds``."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # A fork does not copy the threads of OpenMP, so use one thread, as DataLoader workers do.
            torch.set_num_threads(1)
            task()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, "the child failed; it has printed why"
            return
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")
