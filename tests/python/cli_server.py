"""Run shoestring commands in separate processes without importing the libraries each time.

A server process imports PyTorch, Transformers and shoestring's command line once, and forks for every
command. The server has no threads, because forking a process with threads is unsafe. Each command runs in a
real process, so tests can race, interrupt and kill it. The images of its report are blank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ports import free_port


class Ended(NamedTuple):
    """A command that has ended, with what it has written."""

    code: int
    out: str
    errors: str


class Commands:
    """Start shoestring commands through the server process; use as a context manager."""

    def __enter__(self) -> Commands:
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._server.communicate(timeout=60)  # the server exits when its stdin is closed

    def start(self, *arguments: object, log: Path, code: str = "", errors: Path | None = None) -> int:
        """Start ``shoestring ARGUMENTS`` with its output in ``log``; return the process id.

        ``code`` runs in the new process before the command. With ``errors``, this file gets the standard error.
        """
        files = {"log": str(log), "errors": None if errors is None else str(errors)}
        return self._ask({"arguments": [str(argument) for argument in arguments], "code": code, **files})

    def wait(self, process: int) -> int:
        """Return the exit code of a command's process, or the negative signal number if a signal ended it."""
        return self._ask({"wait": process})

    def run(self, *arguments: object, log: Path, code: str = "") -> int:
        return self.wait(self.start(*arguments, log=log, code=code))

    def together(self, folder: Path, *arguments: object, code: str = "") -> list[Ended]:
        """Run a command in two processes with the environment of torchrun, and log files in ``folder``."""
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        logs = [[folder / f"{name}.{rank}" for name in ("out", "errors")] for rank in range(2)]
        processes = []
        for rank, (out, errors) in enumerate(logs):
            environment = {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            own = f"import os; os.environ.update({environment!r})\n{code}"
            processes.append(self.start(*arguments, log=out, errors=errors, code=own))
        codes = [self.wait(process) for process in processes]
        return [
            Ended(status, out.read_text(), errors.read_text())
            for status, (out, errors) in zip(codes, logs, strict=True)
        ]

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Poll until ``condition`` returns a true value, and return this value. Fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)
    return value


def _serve() -> None:
    import gc

    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import peft  # noqa: F401
    import torch
    import transformers.conversion_mapping  # noqa: F401

    from blank_images import save_blank
    from shoestring.cli import finetune, train  # noqa: F401
    from shoestring.cli.app import main
    from shoestring.training import memory

    torch.set_num_threads(1)
    memory.import_models()
    matplotlib.figure.Figure.savefig = save_blank
    # Commands collect garbage several times, which takes 0.3 s with the objects of these libraries.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _command(main, **request)
        print(answer, flush=True)


def _command(
    main: Callable[[list[str]], int], arguments: list[str], log: str, errors: str | None, code: str
) -> None:
    """Run a shoestring command in this forked process, and end the process as Python itself would."""
    result = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        error = output if errors is None else os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, copy in ((nothing, 0), (output, 1), (error, 2)):
            os.dup2(descriptor, copy)
        exec(code, {})
        result = main(arguments)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(result)


if __name__ == "__main__":
    _serve()
