"""Removes each wait of the host code in turn. The tests on the simulated device should notice each one.

Host code orders the work of streams with fences, events, guards and ``record_stream``. On the CPU none of
these has an effect. This script finds each of them in ``csrc`` and ``python/shoestring``, leaves one out, and
runs the tests. If they still pass, the wait survives: it is not needed, or no test shows the need. Survivors
that are known are listed in SURVIVORS, each with its reason.

The tree is not changed, and the C++ code is built once: the environment variable SHOESTRING_WITHOUT selects
the wait that the changed library leaves out. Only the translation units with waits are compiled again; they
are linked with the other object files of the build folder, which must be a build with Ninja. It takes a
quarter of an hour to build, and then as long as the tests for each wait.

    python tests/device/remove_waits.py [--build DIR] [--only TEXT ...] [--list] [--command COMMAND]
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist"]
COPIES = ["releases", "offload", "optimizers", "command_line"]
# The tests that use a wait, by the beginning of the name of its file. The first entry that fits counts. A name
# without a folder is that of a file in this folder.
TESTS = {
    "csrc/offload/weight_store.cpp": ["weights", *COPIES],
    "csrc/offload/": COPIES,
    "csrc/optim/core/host_steps.cpp": COPIES,
    "csrc/optim/wrappers/guard_core.cpp": ["training_loop", "devices"],
    "csrc/optim/wrappers/averages_core.cpp": ["training_loop", "devices"],
    "csrc/runs/": ["tests/python/runs/test_monitor.py"],
    "python/shoestring/optim/guard.py": ["training_loop"],
    "python/shoestring/optim/sharded.py": ["sharded"],
    "python/shoestring/runs/": ["training_loop"],
    "csrc/data/": ["releases", "offload", "command_line"],
    "csrc/checkpoint/": COPIES,
    "python/": COPIES,
    "csrc/": ["devices"],
}
SECONDS = 900  # a test run that takes longer hangs, because nobody signals what it waits for

TIMES = "measures a time, which no test can tell from the time of a slow machine"
ERRORS = "the measurement before it has ended with the copies; it raises their errors"
NAMED = "every call below it names its device or its stream; the guard saves PyTorch the switch for each"
AFTER = "a copy back begins after settle() has ordered the current stream after the copy out, so this order is there twice"
ALONE = "processes do not communicate on the simulated device"
# Waits that the tests do not notice, by the name that the script prints, with the reason.
SURVIVORS: dict[str, str] = {
    "csrc/adapters/lora_linear.cpp: c10::OptionalDeviceGuard guard(x.device());": NAMED,
    "csrc/adapters/lora_linear.cpp: c10::OptionalDeviceGuard guard(x.device()); #2": NAMED,
    "csrc/adapters/lora_weight_norm.cpp: c10::OptionalDeviceGuard guard(weight.device());": NAMED,
    "csrc/checkpoint/sequence.cpp: synchronize(x.device());": TIMES,
    "csrc/core/device.cpp: "
    "c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(with_index(device).index());": TIMES,
    "csrc/distributed/compressor.cpp: ready.block(*stream_);": ALONE,
    "csrc/distributed/named_backend.cpp: work_->synchronize();": ALONE,
    "csrc/gemm/addmm.cpp: c10::OptionalDeviceGuard guard(self.device());": NAMED,
    "csrc/gemm/linear.cpp: c10::OptionalDeviceGuard guard(x.device());": NAMED,
    "csrc/gemm/linear.cpp: c10::OptionalDeviceGuard guard(x.device()); #2": NAMED,
    "csrc/gemm/linear.cpp: c10::OptionalDeviceGuard guard(weights[0].device());": NAMED,
    "csrc/layers/embedding.cpp: c10::OptionalDeviceGuard guard(weight.device());": NAMED,
    "csrc/layers/embedding.cpp: c10::OptionalDeviceGuard guard(ids.device());": NAMED,
    "csrc/offload/activation_core.cpp: c10::OptionalDeviceGuard guard(device);": NAMED,
    "csrc/offload/activation_core.cpp: c10::OptionalDeviceGuard guard(device); #2": NAMED,
    "csrc/offload/activation_core.cpp: e.out": AFTER,
    "csrc/offload/activation_core.cpp: e.out #2": AFTER,
    "csrc/offload/activation_core.cpp: e->out->is_done()": (
        "without it the storages of a layer are freed at its end, after the same wait: the peak of memory is lower, "
        "and forward waits for the link"
    ),
    "csrc/offload/host_memory.cpp: c10::OptionalDeviceGuard guard(device);": (
        "memory is page-locked for all devices; the guard selects the one that does it"
    ),
    "csrc/offload/link.cpp: synchronize(device_);": (
        "measures a time, and keeps the host from adding products faster than a slow device runs them"
    ),
    "csrc/offload/link.cpp: e->out->synchronize();": ERRORS,
    "csrc/offload/link.cpp: e->in->synchronize();": ERRORS,
    "csrc/offload/slots.cpp: slot.copied->is_done()": (
        "whoever asks waits for the copy next; without the question the host waits for it sooner"
    ),
    "csrc/offload/weight_store.cpp: c10::OptionalDeviceGuard guard(device);": NAMED,
    "csrc/offload/weight_store.cpp: c10::OptionalDeviceGuard guard(device); #2": NAMED,
    "csrc/quantization/quantize_4bit.cpp: c10::OptionalDeviceGuard guard(absmax.device());": NAMED,
}

NO_FENCE = "::shoestring::offload::Fence::now(c10::kCPU)"  # a fence of work that is done
# Function calls that are statements of their own.
CALLS = re.compile(
    r"(?:->|\.)(?:block|synchronize|record_stream|recordDataPtrOnStream|synchronizeDevice|record(?=\(\*))\(|"
    r"(?<![\w.>:])(?:wait_issued|synchronize)\("
)
GUARDS = re.compile(r"\bc10::(Optional)?(Device|Stream)Guard guard\((?P<value>(?:[^()]|\([^()]*\))*)\);")
FENCES = re.compile(
    r"(?<!FencePtr )\b(?:offload::)?Fence::now\(\w+(?:->\w+)?\)|(?<=[{ ])e\.out(?=\})|\bslot\.made(?=,)"
)
QUERIES = re.compile(r"[\w.]+(?:->\w+)*->(?:is_done|query)\(\)")
PYTHON_CALLS = {"synchronize", "record_stream", "record", "wait_stream", "wait_event"}
KEPT = """#ifndef SHOESTRING_KEPT
#define SHOESTRING_KEPT
#include <cstdlib>
namespace shoestring {
inline bool kept(int wait) {
  static const char* const without = std::getenv("SHOESTRING_WITHOUT");
  return without == nullptr || std::atoi(without) != wait;
}
}
#endif
#line 1
"""


@dataclass(frozen=True)
class Wait:
    """A wait in a source file, and the text that replaces it. In C++ ``{keep}`` asks whether it is kept."""

    file: str
    line: int
    begin: int
    end: int
    text: str
    replacement: str

    @property
    def is_python(self) -> bool:
        return self.file.endswith(".py")


def code_of(text: str) -> str:
    """Return C++ with comments blanked, of the same length."""
    return re.sub(r"//[^\n]*", lambda m: " " * len(m.group()), text)


def statement_of(code: str, at: int) -> tuple[int, int]:
    """Return the begin and the end of the expression statement around a call, after ``if`` and ``for``."""
    begin = max(code.rfind(mark, 0, at) for mark in ";{}") + 1
    while control := re.match(r"\s*(?:(?:if|for|while)(?: constexpr)? (?=\()|else\b)", code[begin:at]):
        begin += control.end()
        depth = 0
        while code[begin] == "(" or depth > 0:
            depth += {"(": 1, ")": -1}.get(code[begin], 0)
            begin += 1
    begin += len(code[begin:at]) - len(code[begin:at].lstrip())
    return begin, code.index(";", at) + 1


def cpp_waits(path: Path) -> Iterator[tuple[int, int, str]]:
    """Yield begin, end and replacement of each wait of a C++ file."""
    code = code_of(path.read_text())
    for m in CALLS.finditer(code):
        begin, end = statement_of(code, m.start())
        statement = code[begin:end]
        if re.match(r"(?:void|FencePtr|const|return|inline)\b", statement) or " = " in statement:
            continue  # a definition or an assignment, which uses what the call returns
        yield begin, end, f"if ({{keep}}) {statement}"
    for m in GUARDS.finditer(code):
        kind = f"c10::{m.group(2)}"
        kept = f"{{keep}} ? std::optional<{kind}>({m.group('value')}) : std::nullopt"
        yield *m.span(), f"c10::Optional{m.group(2)}Guard guard({kept});"
    for m in FENCES.finditer(code):
        yield *m.span(), f"({{keep}} ? {m.group()} : {NO_FENCE})"
    for m in QUERIES.finditer(code):
        yield *m.span(), f"(!{{keep}} || {m.group()})"


def python_waits(path: Path) -> Iterator[tuple[int, int, str]]:
    """Yield begin, end and replacement of each wait of a Python file."""
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
            continue
        function = node.value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in PYTHON_CALLS:
            assert node.end_lineno is not None and node.end_col_offset is not None
            offsets = (
                starts[node.lineno - 1] + node.col_offset,
                starts[node.end_lineno - 1] + node.end_col_offset,
            )
            begin, end = (len(text.encode()[:offset].decode()) for offset in offsets)
            yield begin, end, "pass"


def waits() -> list[Wait]:
    """Return every wait of the host code."""
    found = []
    files = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h") and "_simd" not in p.name]
    for path in sorted([*files, *(ROOT / "python/shoestring").rglob("*.py")]):
        text = path.read_text()
        sites = python_waits(path) if path.suffix == ".py" else cpp_waits(path)
        for begin, end, replacement in sorted(sites):
            line = text.count("\n", 0, begin) + 1
            shown = " ".join(text[begin:end].split())
            found.append(Wait(str(path.relative_to(ROOT)), line, begin, end, shown, replacement))
    return found


def names(all_waits: list[Wait]) -> list[str]:
    """Return a name of each wait that does not change with its line: file, text, and a number if needed."""
    given: list[str] = []
    for wait in all_waits:
        plain = f"{wait.file}: {wait.text}"
        count = sum(name == plain or name.startswith(f"{plain} #") for name in given)
        given.append(f"{plain} #{count + 1}" if count else plain)
    return given


def changed(text: str, own: list[tuple[int, Wait]]) -> str:
    """Return a C++ source in which each wait asks whether it is kept."""
    for number, wait in sorted(own, key=lambda one: -one[1].begin):
        kept = wait.replacement.replace("{keep}", f"::shoestring::kept({number})")
        text = text[: wait.begin] + kept + text[wait.end :]
    return KEPT + text


def run(*command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command and return its completed process. ``more`` is added to the environment."""
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | more
    )


def checked(command: str, folder: Path) -> str:
    """Run a shell command in a folder and return what it prints. Exit if it fails."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode != 0:
        sys.exit(f"{command[:200]}\nfailed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def build_library(build: Path, work: Path, all_waits: list[Wait], files: set[str]) -> None:
    """Build libshoestring.so, in which the waits of these C++ files are selectable, in ``work/shoestring/lib``."""
    sources = work / "csrc"
    for file in files:
        own = [(number, wait) for number, wait in enumerate(all_waits, 1) if wait.file == file]
        path = sources / file.removeprefix("csrc/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed((ROOT / file).read_text(), own))
    commands = checked("ninja -t commands libshoestring.so", build).splitlines()
    deps = dict.fromkeys(re.findall(r"^(\S+\.o): #deps", checked("ninja -t deps", build), re.M))
    link = commands[-1]
    for command in commands:
        unit = re.search(r" -o (\S+\.o) -c (\S+)$", command)
        if unit is None or "shoestring.dir/" not in unit.group(1) or unit.group(1) not in deps:
            continue
        lines = checked(f"ninja -t deps {shlex.quote(unit.group(1))}", build).splitlines()[1:]
        needed = {os.path.normpath(build / line.strip()) for line in lines}  # ccache makes paths relative
        if needed.isdisjoint(f"{ROOT}/{file}" for file in files):
            continue
        source, target = work / Path(unit.group(2)).name, work / Path(unit.group(1)).name
        text = Path(unit.group(2)).read_text()
        if Path(unit.group(2)).is_relative_to(ROOT / "csrc"):  # not a unity build
            text = f'#include "{Path(unit.group(2)).relative_to(ROOT)}"\n'
        for file in files:
            text = text.replace(f'"{file}"', f'"{work}/{file}"')
        source.write_text(text)
        command = re.sub(r" -MD -MT \S+ -MF \S+", "", command[: unit.start()])
        command = command.replace(f" -I{ROOT}/csrc ", f" -I{sources} -I{ROOT}/csrc -I{ROOT} ", 1)
        print(f"compiling {source.name}", flush=True)
        checked(f"{command} -o {target} -c {source}", build)
        link = link.replace(f" {unit.group(1)} ", f" {target} ")
    library = work / "shoestring/lib/libshoestring.so"
    library.unlink()  # in the copy of the package, a link to the library without changes
    checked(link.replace(" -o libshoestring.so ", f" -o {library} "), build)


def copy_package(work: Path) -> None:
    """Copy the Python package, with links to its libraries."""
    installed = ROOT / "python/shoestring"
    skipped = shutil.ignore_patterns("lib", "include", "share", "__pycache__")
    shutil.copytree(installed, work / "shoestring", ignore=skipped)
    (work / "shoestring/lib").mkdir()
    for file in (installed / "lib").iterdir():
        (work / "shoestring/lib" / file.name).symlink_to(file)


def first_error(output: str) -> str:
    """Return the first finding of the simulated device, else the first failure that the tests report."""
    patterns = (r"of which the first is\n(?:E +)?(.*)", r"^simdev: (.*)", r"^(?:E  +|FAILED )(.*)")
    for pattern in patterns:
        if found := re.search(pattern, output, re.M):
            return found.group(1)[:160]
    return (output.strip().splitlines() or ["it printed nothing"])[-1][:160]


def tests_of(wait: Wait) -> list[str]:
    """Return the command that runs the tests which use a wait."""
    own = next(tests for beginning, tests in TESTS.items() if wait.file.startswith(beginning))
    return [*PYTEST, *(name if "/" in name else f"tests/device/test_{name}.py" for name in own)]


def outcome(command: list[str], work: Path, build: Path, without: int = 0) -> tuple[bool, str]:
    """Run the tests. Return whether all pass, and the first failure."""
    # The other tests have a backend of their own, and PyTorch would load this one from its folder.
    backend = (
        [] if any(part.startswith("tests/python/") for part in command) else [str(ROOT / "tests/device")]
    )
    path = os.pathsep.join([str(work), *backend, os.environ.get("PYTHONPATH", "")])
    environment = {
        "PYTHONPATH": path,
        "SHOESTRING_BUILD": str(build),
        "SHOESTRING_WITHOUT": str(without),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = run("timeout", str(SECONDS), *command, **environment)
    except UnicodeDecodeError as error:  # a crash may print anything
        return False, str(error)
    if done.returncode == 124:
        return False, f"the tests hang for {SECONDS} s"
    return done.returncode == 0, first_error(done.stdout + done.stderr)


def main() -> int:
    """Leave out each wait in turn. Return 1 if the tests pass without one that SURVIVORS does not list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only waits with TEXT in the name"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the waits, and build nothing")
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build", help="the build folder of `make build-tests`"
    )
    parser.add_argument("--command", help="command to run in place of the tests that use a wait")
    options = parser.parse_args()
    all_waits = waits()
    given = names(all_waits)
    chosen = [number for number, name in enumerate(given, 1) if any(text in name for text in options.only)]
    if options.list:
        print("\n".join(f"{all_waits[n - 1].line:5} {given[n - 1]}" for n in chosen))
        return 0
    unknown = sorted(set(SURVIVORS) - set(given))
    if unknown:
        sys.exit("SURVIVORS lists waits that are not there: " + ", ".join(unknown))
    build = options.build.resolve()
    work = build / "remove_waits"
    shutil.rmtree(work, ignore_errors=True)
    copy_package(work)
    files = {all_waits[number - 1].file for number in chosen if not all_waits[number - 1].is_python}
    if files:
        build_library(build, work, all_waits, files)
    good: list[list[str]] = []
    unlisted, listed = [], 0
    for number in chosen:
        wait, name = all_waits[number - 1], given[number - 1]
        command = shlex.split(options.command) if options.command else tests_of(wait)
        if command not in good:
            passed, error = outcome(command, work, build)
            if not passed:
                sys.exit(f"the tests fail before anything is removed: {error}")
            good.append(command)
        source = work / wait.file.removeprefix("python/")
        if wait.is_python:
            text = source.read_text()
            source.write_text(text[: wait.begin] + wait.replacement + text[wait.end :])
        passed, error = outcome(command, work, build, 0 if wait.is_python else number)
        if wait.is_python:
            source.write_text(text)
        known = SURVIVORS.get(name)
        result = f"noticed: {error}" if not passed else f"survived: {known}" if known else "SURVIVED"
        print(f"{wait.line:5} {name}: {result}", flush=True)
        listed += passed and known is not None
        if passed and known is None:
            unlisted.append(name)
        if not passed and known is not None:
            print(f"      is noticed now; take it out of SURVIVORS: {name}", flush=True)
    shutil.rmtree(work)
    noticed = len(chosen) - listed - len(unlisted)
    print(f"{noticed} noticed, {listed} known to survive, {len(unlisted)} survived unexpectedly")
    return 1 if unlisted else 0


if __name__ == "__main__":
    sys.exit(main())
