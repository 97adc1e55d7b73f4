"""Fuzz the functions that read files (readers) with damaged files.

A reader must load the file, or raise a documented exception with a message of one line. It must stay within
limits of time and memory, and write nothing. ``--fuzz-seconds`` sets the duration, and ``--seed`` selects the
mutations. A failure names the seed and the number of the case, and keeps the damaged folder.
"""

import faulthandler
import importlib
import inspect
import os
import pkgutil
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from mutate import BYTES
from readers import NOT_READERS, READERS, Reader

import shoestring

SECONDS = 10.0  # time limit for loading one damaged file
MEBIBYTES = 1024  # maximum increase of the process's peak memory in one case
CPP_SHARE = 0.25  # fraction of --fuzz-seconds that the C++ readers get
FEWEST = 20  # minimum number of cases for each reader, however short the run is
SPECIAL = ("pipe", "folder", "link to nothing", "link to /dev/zero", "absent", "empty")


def make_special(path: Path, kind: str) -> None:
    """Replace the file ``path`` by the object that ``kind``, an entry of SPECIAL, names, such as a pipe."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to nothing":
        path.symlink_to("nowhere")
    elif kind == "link to /dev/zero":
        path.symlink_to("/dev/zero")
    elif kind == "empty":
        path.touch()


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return mode, size and modification time of every file in a folder, by name."""
    found = ((path, path.lstat()) for path in folder.rglob("*"))
    return {
        str(path.relative_to(folder)): (info.st_mode, info.st_size, info.st_mtime_ns) for path, info in found
    }


def peak() -> int:
    """Return the peak memory of the process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


class TooLongError(BaseException):
    """Raised when a case takes too long. It is not an Exception, so no reader catches it."""


def too_long(*_: object) -> None:
    raise TooLongError


def verdict(reader: Reader, folder: Path) -> tuple[str, str]:
    """Let the reader load the folder. Return "loaded", "refused" or "failed", and the reason."""
    before, memory = listing(folder), peak()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        reader.load(folder)
        result = ("loaded", "")
    except reader.errors as error:
        text = str(error)
        result = ("refused", text)
        if "\n" in text.strip() or len(text) > 2000 or not text.strip():
            result = (
                "failed",
                f"expected a message of one line, received {type(error).__name__}: {text[:300]!r}",
            )
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(error, KeyboardInterrupt):
            raise
        kind = (
            f"took more than {SECONDS} s"
            if isinstance(error, TooLongError)
            else f"undocumented {type(error).__name__}"
        )
        result = ("failed", f"{kind}: {traceback.format_exc(-5)}"[:3000])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if result[0] != "failed" and peak() - memory > MEBIBYTES:
        result = ("failed", f"took {peak() - memory} MiB of memory")
    if result[0] != "failed" and listing(folder) != before:
        result = ("failed", f"changed its folder: {set(listing(folder).items()) ^ set(before.items())}")
    return result


@pytest.fixture(autouse=True)
def limits() -> object:
    """Limit the time of each case and the memory of the process.

    If a case hangs in native code, where no Python exception can be raised, the process ends with a
    traceback.
    """
    handler = signal.signal(signal.SIGALRM, too_long)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (12 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.signal(signal.SIGALRM, handler)
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name.replace(" ", "-"))
def test_reader(reader: Reader, seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--fuzz-seconds") * (1 - CPP_SHARE)
    seconds *= reader.share / sum(other.share for other in READERS)
    folder = tmp_path / reader.folder
    folder.mkdir(parents=True)
    reader.make(folder)
    mutators = {
        path.name: change for name, change in reader.files.items() for path in sorted(folder.glob(name))
    }
    sound = {name: (folder / name).read_bytes() for name in mutators}
    # The undamaged files must load. This call also does the imports and fills caches before memory is
    # measured.
    assert verdict(reader, folder)[0] == "loaded", verdict(reader, folder)
    counts = {"loaded": 0, "refused": 0, "failed": 0}
    failures: dict[str, str] = {}
    end, case = time.monotonic() + seconds, 0
    while time.monotonic() < end or case < FEWEST:
        rng = random.Random(f"{seed} {reader.name} {case}")
        name = rng.choice(list(sound))
        special = reader.special and (case < len(SPECIAL) or rng.random() < 0.01)
        if special:
            make_special(folder / name, SPECIAL[case] if case < len(SPECIAL) else rng.choice(SPECIAL))
        else:
            (folder / name).write_bytes(mutators[name](sound[name], rng))
        faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
        torch.manual_seed(0)
        result, reason = verdict(reader, folder)
        faulthandler.cancel_dump_traceback_later()
        counts[result] += 1
        if result == "failed" and reason not in failures.values():
            kept = tmp_path / f"case-{case}"
            if not special:
                shutil.copytree(folder, kept)
            failures[f"--seed={seed} case {case} ({name}, {kept})"] = reason
        remove(folder / name)
        (folder / name).write_bytes(sound[name])
        case += 1
    print(
        f"fuzz: {reader.name}: {case} cases, {counts['loaded']} loaded, {counts['refused']} refused, {counts['failed']} failed"
    )
    text = "\n".join(f"{place}: {reason}" for place, reason in list(failures.items())[:8])
    assert not failures, (
        f"{reader.name}: {counts['failed']} of {case} cases failed, {len(failures)} kinds:\n{text}"
    )


def takes_path(function: object) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return any("Path" in str(parameter.annotation) for parameter in parameters)


def public_functions() -> set[str]:
    """Return the public functions and classes of all modules of shoestring that take a path."""
    found = set()
    for info in pkgutil.walk_packages(shoestring.__path__, "shoestring."):
        if info.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(info.name)).items():
            own = getattr(value, "__module__", None) == info.name and not name.startswith("_")
            if own and (inspect.isfunction(value) or inspect.isclass(value)) and takes_path(value):
                found.add(f"{info.name.removeprefix('shoestring.')}.{name}")
    return found


def test_every_reader_has_a_fuzzer() -> None:
    """Check that each public function that takes a path is in READERS, or in NOT_READERS with a reason."""
    fuzzed = {function for reader in READERS for function in reader.covers}
    found = public_functions()
    assert found - fuzzed - NOT_READERS.keys() == set(), "functions that take a path, without a fuzzer"
    assert not fuzzed & NOT_READERS.keys()
    modules = {function.rpartition(".")[0] for function in fuzzed}
    assert all(hasattr(importlib.import_module(f"shoestring.{name}"), "__doc__") for name in modules)
    gone = [function for function in fuzzed if function not in found]
    assert not gone, "fuzzers of functions that are no longer there"


def test_mutations_are_repeatable(seed: int) -> None:
    data = bytes(range(200))
    for change in BYTES:
        results = [change(data, random.Random(f"{seed} {i}")) for i in (1, 1, 2, 3, 4)]
        assert results[0] == results[1] and len(set(results)) > 1
