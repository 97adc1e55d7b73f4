"""`shoestring monitor`: run a program, measure it, and name its bottleneck. PyTorch is not needed.

The program has a process group of its own, which is in the foreground of the terminal. Ctrl-C therefore reaches the
program once, and a signal that is sent to this process is passed on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from shoestring.cli.monitor_live import LiveView
from shoestring.core.errors import InputError
from shoestring.files.write_file import write_text
from shoestring.runs.monitor_process import ProcessMonitor, check_interval
from shoestring.runs.monitor_report import MonitorReport

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 5.0  # seconds after which a program that does not end by SIGTERM is killed


def run(command: list[str], interval: float, plot: Path | None, as_json: Path | None, live: bool) -> int:
    """Run a program and print its report on stderr. Return its exit code, or 128 plus the signal that ended it."""
    check_interval(interval)
    for option, path in (("plot", plot), ("json", as_json)):
        if path is not None:
            _check_writable(option, path)
    if shutil.which(command[0]) is None:
        raise InputError(f"command: expected a program, received {command[0]}, which was not found")
    view = LiveView() if live and sys.stdout.isatty() and sys.stderr.isatty() else None
    with _Program(command, view) as program:
        monitor = ProcessMonitor(program.pid, interval)
        try:
            program.wait(monitor)
            report = monitor.report()  # the program has ended, and its counters are kept until close()
        finally:
            monitor.close()
        code = program.close()
    print(report, file=sys.stderr)
    _write(report, plot, as_json)
    return code


def _check_writable(option: str, path: Path) -> None:
    """Raise InputError if a file cannot be written, before the program runs for hours."""
    is_new = not path.exists()
    try:
        if is_new or path.is_file() or path.is_dir():
            path.open("ab").close()
    except OSError as error:
        raise InputError(f"--{option} {path}: {error.strerror}") from None
    if is_new:
        path.unlink()
    if option == "plot":
        from matplotlib.backend_bases import FigureCanvasBase

        formats = FigureCanvasBase.get_supported_filetypes()
        if path.suffix[1:].lower() not in formats:
            raise InputError(
                f"--plot {path}: expected a name that ends in one of {', '.join(sorted(formats))}"
            )


def _write(report: MonitorReport, plot: Path | None, as_json: Path | None) -> None:
    if as_json is not None:
        write_text(as_json, report.to_json() + "\n")
    if plot is not None:
        report.plot(plot)


class _Program:
    """A program in a process group of its own. Leaving the block ends it."""

    def __init__(self, command: list[str], view: LiveView | None) -> None:
        self._command, self._view = command, view
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []  # signals that came before the program ran
        self._terminal = -1  # the terminal that the program has, if this process had it

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> _Program:
        self._signals = _passing_on(self._pass_on)
        self._signals.__enter__()
        try:
            output = None if self._view is None else self._view.terminal()
            with suppress(OSError):
                if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
                    self._terminal = 0
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=output, preexec_fn=self._lead_group
            )
            if self._view is not None:
                self._view.start()
            for number in self._early:
                self._pass_on(number)
        except OSError as error:
            self.__exit__()
            raise InputError(f"command: {self._command[0]}: {error.strerror}") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def _lead_group(self) -> None:
        """Take the terminal, in the process of the program before it runs."""
        os.setpgrp()
        self._give_terminal(os.getpid())

    def wait(self, monitor: ProcessMonitor) -> None:
        """Wait until the program has ended, and leave it as a zombie, whose counters can be read."""
        options = os.WEXITED | os.WSTOPPED | os.WNOWAIT
        while True:
            if self._view is not None:
                self._view.show(monitor)
                ended = os.waitid(os.P_PID, self.pid, options | os.WNOHANG)
            else:
                ended = os.waitid(os.P_PID, self.pid, options)
            if ended is None:
                continue
            if ended.si_code != os.CLD_STOPPED:
                return
            self._suspend()

    def _suspend(self) -> None:
        """Stop this process as well, as the program has been; both go on when the shell continues them."""
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)  # so that it is not reported again
        if self._terminal < 0:
            # Whoever stopped the program continues it.
            os.waitid(os.P_PID, self.pid, os.WCONTINUED | os.WEXITED | os.WNOWAIT)
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WCONTINUED | os.WNOHANG)
            return
        self._give_terminal(os.getpgrp())
        os.kill(os.getpid(), signal.SIGSTOP)
        self._give_terminal(self.pid)
        os.killpg(self.pid, signal.SIGCONT)

    def close(self) -> int:
        """Read the exit code of the program."""
        assert self._process is not None
        code = self._process.wait()
        if self._view is not None:
            self._view.stop()
        return code if code >= 0 else 128 - code

    def __exit__(self, *_: object) -> None:
        try:
            if self._process is not None and self._process.poll() is None:
                self._end()
        finally:
            if self._view is not None:
                self._view.stop()
            self._give_terminal(os.getpgrp())
            self._signals.__exit__(None, None, None)

    def _end(self) -> None:
        """End a program whose monitor has failed."""
        assert self._process is not None
        os.killpg(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def _give_terminal(self, group: int) -> None:
        """Make a group of processes the one that reads the terminal and gets its Ctrl-C."""
        if self._terminal < 0:
            return
        # A process in the background that takes the terminal gets SIGTTOU, which would stop it.
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            with suppress(OSError):
                os.tcsetpgrp(self._terminal, group)
        finally:
            signal.signal(signal.SIGTTOU, before)

    def _pass_on(self, number: int, _: FrameType | None = None) -> None:
        """Send a signal to the program, or keep it until the program has started."""
        if self._process is None:
            self._early.append(number)
            return
        with suppress(ProcessLookupError):
            # Ctrl-C and the end of a terminal reach all processes of a group, but SIGTERM reaches one.
            (os.kill if number == signal.SIGTERM else os.killpg)(self.pid, number)


@contextmanager
def _passing_on(handler: object) -> Iterator[None]:
    """Handle the signals in the block, in place of the handlers of other commands."""
    wakeup = signal.set_wakeup_fd(-1)
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    replaced = [number for number, old in before.items() if old is not signal.SIG_IGN]
    for number in replaced:
        signal.signal(number, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, before[number])
        signal.set_wakeup_fd(wakeup)
