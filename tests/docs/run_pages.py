"""Run the Python blocks of documentation pages, each page in a process and an empty folder of its own.

Usage: python tests/docs/run_pages.py PAGE...

The blocks of a page run in order in one namespace, on the CPU. PyTorch, shoestring and transformers are imported
once, and each page runs in a fork of that process. A line per page tells how it ended. What a page printed, and
the traceback of an error, with page and line, are shown if the page failed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from doc_pages import Block, blocks, name_of

PRELOADED = ("torch", "shoestring", "transformers", "transformers.models.llama.modeling_llama")
# A page is stopped after this time. It fails if it takes more time of the processor, which does not depend on what
# else the machine does; a page should take at most 5 s of it.
SECONDS = 120
CPU_SECONDS = 20


@dataclass(frozen=True)
class Result:
    """How a page ended: its path, whether it passed, its seconds of processor time, and its output."""

    page: Path
    passed: bool
    seconds: float
    output: str


def run_pages(pages: list[Path], jobs: int = 2, preloaded: Iterable[str] = PRELOADED) -> Iterator[Result]:
    """Run pages, several at a time, and yield their results as they end."""
    for module in preloaded:
        importlib.import_module(module)
    waiting = [(page, python) for page in pages if (python := _python(page))]
    running: dict[int, tuple[Path, float, int, tempfile.TemporaryDirectory[str]]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            page, python = waiting.pop(0)
            folder = tempfile.TemporaryDirectory()
            output = os.memfd_create("output")
            child = _start(python, folder.name, output)
            running[child] = page, time.monotonic(), output, folder
        time.sleep(0.01)
        for child, (page, start, output, folder) in list(running.items()):
            ended, status, usage = os.wait4(child, os.WNOHANG)
            in_time = bool(ended) or time.monotonic() - start < SECONDS
            if not ended and in_time:
                continue
            if not in_time:
                # The child leads a process group, so this also ends what the page has started.
                os.killpg(child, signal.SIGKILL)
                _, status, usage = os.wait4(child, 0)
            del running[child]
            folder.cleanup()
            with os.fdopen(output, "rb") as file:
                file.seek(0)
                text = file.read().decode(errors="replace")
            seconds = usage.ru_utime + usage.ru_stime
            if not in_time:
                text += f"the page did not end within {SECONDS} s\n"
            elif seconds > CPU_SECONDS:
                text += f"the page took {seconds:.0f} s of the processor; the limit is {CPU_SECONDS} s\n"
            yield Result(page, status == 0 and seconds <= CPU_SECONDS, seconds, text)


def _python(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.kind == "python"]


def _start(python: list[Block], folder: str, output: int) -> int:
    """Fork a child that runs the blocks in ``folder`` and writes to the file ``output``; return its process ID."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # A caller such as pytest may have replaced these two.
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        with _as_main() as module:
            for block in python:
                # The empty lines give each line the number that it has in the page.
                code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
                exec(code, module.__dict__)
        status = 0
    except SystemExit as error:
        status = 0 if not error.code else 1
        print(f"the page ends with SystemExit({error.code!r})")
    except BaseException as error:
        frame = error.__traceback__
        # Leave out the frames of this file.
        while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
            frame = frame.tb_next
        traceback.print_exception(type(error), error, frame)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def _as_main() -> Iterator[types.ModuleType]:
    """Make a new module ``__main__``, in which a page runs as a script would."""
    module = types.ModuleType("__main__")
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        yield module
    finally:
        sys.modules["__main__"] = before


def show(result: Result) -> None:
    """Print a line on a page, and what it printed if it failed."""
    print(
        f"{'ok' if result.passed else 'not ok'} {name_of(result.page)} ({result.seconds:.1f} s of processor time)",
        flush=True,
    )
    if not result.passed:
        print(result.output, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the Python blocks of documentation pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="pages that run at the same time")
    parser.add_argument("--output", action="store_true", help="show what the pages print")
    options = parser.parse_args()
    failed = 0
    for result in run_pages([page.resolve() for page in options.pages], options.jobs):
        show(result)
        if options.output and result.passed:
            print(result.output)
        failed += not result.passed
    return failed


if __name__ == "__main__":
    sys.exit(main())
