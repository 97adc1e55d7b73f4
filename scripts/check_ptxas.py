#!/usr/bin/env python3
"""Compares the resources that ptxas reports for each CUDA kernel with the budget in a comment above it.

It also reads the machine code (SASS) of some kernels.

The comment directly above a kernel's ``template`` or ``__global__`` is its budget. The budget holds on every
architecture and for every instantiation::

    // Budget: 40 registers, 64 bytes shared, no spills.

Registers per thread and static shared memory per block are upper bounds. "no spills" marks a hot kernel;
without these words, spills are allowed. A kernel that keeps an array in local memory adds ", 64 bytes stack"
before ", no spills"; without this part, no stack is allowed. Instantiations whose first template argument is
float may spill into some stack, if the budget ends in "; in fp32 80 bytes stack".

Files named *_hopper.cu are compiled for sm_90a only. If ptxas reports that it serialised wgmma instructions
in such a file, the check fails. A header next to the .cu files may define kernels too. Their budgets are
checked in each file that includes the header.

The build keeps the output of ptxas next to each object file (``cmake/keep_ptxas.sh``). This script compiles
nothing, and checks the architectures of the build. ``make test-all`` builds sm_75, sm_80 and sm_90, and sm_90a for
*_hopper.cu: one for each kind of kernel.

Machine code is read with cuobjdump of the CUDA toolkit or of Triton's package (``sass.py``). ``sass.json`` lists
what must be in it; ``--write`` renews the lists.

- ``wgmma``: the products of each kernel for Hopper, with shape, type, place of a, and the order of b. Between the
  start of a product and the wait for it, no instruction touches its registers. No instruction uses more registers
  than setmaxnreg left. Local memory is not used.
- ``exact``: source files whose kernels must give the CPU's bytes. The build compiles them a second time with
  ``-fmad=false``. Multiplications, additions and fused ones must have the same counts in both. A file whose fused
  products are exact says so, with the largest numbers of fusions in a kernel.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sass

ROOT = Path(__file__).parents[1]
EXPECTED = ROOT / "scripts/sass.json"
SERIALISED = re.compile(
    r"wgmma\.mma_async instructions are serialized due to (.*) in (?:the )?function '?([^'\s]+)"
)

BUDGET = re.compile(
    r"(\d+) registers, (\d+) bytes shared(?:, (\d+) bytes stack)?(, no spills)?(?:; in fp32 (\d+) bytes stack)?\."
)
ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\d+\w?)'")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
CUMULATIVE = re.compile(r"(\d+) bytes cumulative stack")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Budget:
    """Upper limits of a kernel: registers per thread, shared bytes per block, and stack bytes per thread."""

    registers: int
    shared: int
    stack: int
    spills: bool
    fp32_stack: int = 0

    def __str__(self) -> str:
        stack = f", {self.stack} bytes stack" if self.stack else ""
        fp32 = f"; in fp32 {self.fp32_stack} bytes stack" if self.fp32_stack else ""
        spills = "" if self.spills else ", no spills"
        return f"{self.registers} registers, {self.shared} bytes shared{stack}{spills}{fp32}"

    def of(self, kernel: str) -> Budget:
        """Return the budget of an instantiation, such as forward<float, 64>."""
        if not self.fp32_stack or "<float," not in kernel.replace(">", ","):
            return self
        return Budget(self.registers, self.shared, max(self.stack, self.fp32_stack), spills=True)


@dataclass
class Usage:
    """The figures that ptxas reports for one instantiation on one architecture."""

    symbol: str
    architecture: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    # total bytes of spill stores and spill loads in the kernel and in the functions that it calls
    spills: int = 0


@dataclass(frozen=True)
class Kernel:
    """A kernel's definition in a source file; ``budget`` is None if the comment is missing or unreadable."""

    name: str
    line: int
    budget: Budget | None


def budgets(source: str) -> tuple[list[Kernel], list[str]]:
    """Return the kernels that a source file defines, and an error for each budget without a kernel."""
    kernels, claimed = [], set()
    for match in re.finditer(r"^[^/\n]*\b__global__\b", source, re.MULTILINE):
        name = _name_after(source, match.end())
        if name is None:
            continue
        lines = source[: match.start()].split("\n")[:-1]
        while lines and re.match(r"\s*(template\b|typename\b|class\b|int\b|bool\b|.*>\s*$)", lines[-1]):
            lines.pop()
        budget = None
        if lines and "// Budget:" in lines[-1]:
            claimed.add(len(lines))
            found = BUDGET.fullmatch(lines[-1].split("// Budget:")[1].strip())
            if found:
                registers, shared, stack = (int(found[i] or 0) for i in (1, 2, 3))
                budget = Budget(registers, shared, stack, not found[4], int(found[5] or 0))
        kernels.append(Kernel(name, source.count("\n", 0, match.end()) + 1, budget))
    lone = [
        f"{n}: a budget that stands directly above no kernel: {line.strip()}"
        for n, line in enumerate(source.split("\n"), 1)
        if "// Budget:" in line and n not in claimed
    ]
    return kernels, lone


def _name_after(source: str, at: int) -> str | None:
    """Return the name of the function whose declaration continues at index `at`.

    The name is the word before the parameter list; attributes with parentheses, such as __launch_bounds__,
    are skipped.
    """
    while match := re.compile(r"\s*(\w+)\s*(\()?").match(source, at):
        at = match.end()
        if not match[2]:
            continue
        if match[1] not in ("__launch_bounds__", "__cluster_dims__"):
            return match[1]
        depth = 1
        while depth and at < len(source):
            depth += {"(": 1, ")": -1}.get(source[at], 0)
            at += 1
    return None


def usages(log: str) -> Iterator[Usage]:
    """Yield the usage of each kernel instantiation in the output of ptxas."""
    current = None
    for line in log.splitlines():
        if entry := ENTRY.search(line):
            if current:
                yield current
            current = Usage(*entry.groups())
        elif current and (stack := STACK.search(line)):
            frame, stores, loads = map(int, stack.groups())
            current.stack = max(current.stack, frame)
            current.spills += stores + loads
        elif current and (used := USED.search(line)):
            current.registers = int(used[1])
            current.shared = int(found[1]) if (found := SHARED.search(line)) else 0
            current.stack = max(current.stack, int(found[1]) if (found := CUMULATIVE.search(line)) else 0)
    if current:
        yield current


def demangle(symbols: list[str]) -> dict[str, str]:
    """Return the C++ name of each mangled symbol, without return type, parameters and namespaces."""
    out = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    ).stdout
    return {s: _short(full) for s, full in zip(symbols, out.splitlines(), strict=True)}


def _short(signature: str) -> str:
    signature = signature.replace("(anonymous namespace)", "")
    depth = 0
    for end, c in enumerate(signature):
        depth += {"<": 1, ">": -1}.get(c, 0)
        if c == "(" and depth == 0:
            signature = signature[:end]
            break
    name, bracket, arguments = signature.partition("<")
    return (
        name.split("::")[-1].split(" ")[-1]
        + bracket
        + arguments.replace("shoestring::cuda::", "").replace("::", "")
    )


def compare(usage: Usage, budget: Budget) -> list[str]:
    """Return a message for each resource of which a kernel uses more than its budget."""
    over = [
        f"{used} {what}, and its budget is {allowed}"
        for what, used, allowed in (
            ("registers", usage.registers, budget.registers),
            ("bytes of shared memory", usage.shared, budget.shared),
            ("bytes of stack frame", usage.stack, budget.stack),
        )
        if used > allowed
    ]
    if usage.spills and not budget.spills:
        over.append(f"{usage.spills} bytes of spills, and its budget says no spills")
    return over


def check(
    source: Path, log: str, architectures: list[str]
) -> tuple[list[str], list[tuple[str, Usage, Budget | None]]]:
    """Return the errors of a source file, and a row for the table for each kernel instantiation.

    A source file must have been compiled for all ``architectures``, or for sm_90a alone if its name says so.
    """
    failures: list[str] = []
    named: dict[str, Budget | None] = {}
    includes = re.findall(r'^#include "([\w/]+\.h)"', source.read_text(), re.MULTILINE)
    headers = [path for name in includes for path in (source.parent / name, ROOT / name) if path.exists()]
    for file in (source, *headers):
        kernels, wrong = budgets(file.read_text())
        failures += [f"{file.name}:{line}" for line in wrong]
        failures += [
            f"{file.name}:{k.line}: {k.name}: expected a comment like `// Budget: 40 registers, 64 bytes "
            "shared, no spills.` directly above the kernel"
            for k in kernels
            if k.budget is None
        ]
        named |= {k.name: k.budget for k in kernels}
    found = list(usages(log))
    names = demangle([u.symbol for u in found])
    rows = []
    for usage in found:
        name = names[usage.symbol]
        budget = named.get(name.split("<")[0])
        budget = budget and budget.of(name)
        rows.append((name, usage, budget))
        if name.split("<")[0] not in named:
            failures.append(f"{source.name}: {name}: ptxas compiled it, and the file defines no such kernel")
        elif budget:
            failures += [
                f"{source.name}: {name}, {usage.architecture}: {over}" for over in compare(usage, budget)
            ]
    for reason, symbol in dict.fromkeys(SERIALISED.findall(log)):
        failures.append(
            f"{source.name}: {demangle([symbol])[symbol]}: ptxas serialised its wgmma, due to {reason}"
        )
    for architecture in ["sm_90a"] if source.stem.endswith("_hopper") else architectures:
        here = {name.split("<")[0] for name, usage, _ in rows if usage.architecture == architecture}
        if not here:
            failures.append(
                f"{source.name}: not compiled for {architecture}, which build.json names; run make build"
            )
        else:
            failures += [
                f"{source.name}: {name}: has a budget, and no such kernel was compiled for {architecture}"
                for name, budget in named.items()
                if budget and name not in here
            ]
    return failures, rows


def check_products(
    file: str, code: dict[str, list[sass.Instruction]], listed: dict[str, list[str]]
) -> list[str]:
    """Return the errors in the machine code of a file for Hopper. `code` and `listed` are by kernel."""
    failures = [
        f"{file}: {name}: {text}"
        for name, instructions in code.items()
        for find in (sass.touched_in_flight, sass.beyond_setmaxnreg, sass.local_memory)
        for text in find(instructions)[:3]
    ]
    for name in sorted(listed.keys() | code.keys()):
        found, expected = sass.products(code.get(name, [])), listed.get(name, [])
        if found != expected:
            failures.append(
                f"{file}: {name}: expected the products {expected}, found {found}; if the change is meant, run "
                "scripts/check_ptxas.py --write"
            )
    return failures


def check_exact(
    file: str,
    code: dict[str, list[sass.Instruction]],
    apart: dict[str, list[sass.Instruction]],
    rule: dict[str, Any],
) -> list[str]:
    """Return the errors of a file whose kernels must not depend on ``-fmad``. `apart` is compiled without it."""
    failures = []
    if not code or code.keys() != apart.keys():
        failures.append(f"{file}: expected the same kernels with and without -fmad, run make build-tests")
    allowed = {op: rule[op] for op in ("FFMA", "DFMA") if op in rule}
    if allowed and not rule.get("reason"):
        failures.append(f"{file}: expected a reason for fused products in scripts/sass.json")
    for name in sorted(code.keys() & apart.keys()):
        if error := sass.fused(code[name], apart[name], allowed):
            failures.append(
                f"{file}: {name}: {error}. Use __fmul_rn and __fadd_rn, or state in scripts/sass.json why all "
                "fused products are exact"
            )
    return failures


def named(text: str) -> dict[str, list[sass.Instruction]]:
    """Return the instructions of each kernel by its C++ name."""
    by_symbol = sass.functions(text)
    names = demangle(list(by_symbol))
    return {names[symbol]: code for symbol, code in by_symbol.items()}


def check_machine_code(build: Path, sources: Path, write: bool) -> tuple[list[str], int]:
    """Return the errors in the machine code, and the number of kernels that have none."""
    expected = json.loads(EXPECTED.read_text())
    hopper = sorted(sources.rglob("*_hopper.cu"))
    exact = {
        path: rule for name, rule in expected["exact"].items() if (path := sources.parent / name).exists()
    }
    built, unfused = "CMakeFiles/*/cuda/*/{}.o", "tests/cuda/CMakeFiles/unfused_kernels.dir/**/{}.o"
    for source in list(exact):
        log = next(build.glob(built.format(source.name) + ".ptxas"), None)
        if log is not None and "'sm_80'" not in log.read_text():
            print(f"skipped: {source.name}: fused products are found on sm_80, for which it was not compiled")
            del exact[source]
    if not hopper and not exact:
        return [], 0
    program = sass.disassembler()
    if program is None:
        print("skipped: the machine code was not read: no cuobjdump in PATH, CUDA_HOME or Triton's package")
        return [], 0
    wanted = [(f, built, "sm_90a") for f in hopper] + [
        (f, o, "sm_80") for f in exact for o in (built, unfused)
    ]
    files = [next(build.glob(pattern.format(source.name)), None) for source, pattern, _ in wanted]
    missing = [
        pattern.format(f.name) for (f, pattern, _), file in zip(wanted, files, strict=True) if not file
    ]
    if missing:
        return [f"{build} has no {pattern}; run make build-tests" for pattern in missing], 0
    with ThreadPoolExecutor(2) as pool:
        texts = pool.map(lambda one, file: sass.disassemble(program, file, one[2]), wanted, files)
        code = {one[:2]: named(text) for one, text in zip(wanted, texts, strict=True)}

    if write:
        products = {
            f.name: {name: sass.products(code[f, built][name]) for name in sorted(code[f, built])}
            for f in hopper
        }
        EXPECTED.write_text(json.dumps(expected | {"wgmma": products}, indent=2) + "\n")
        expected["wgmma"] = products
    failures = [
        error
        for f in hopper
        for error in check_products(f.name, code[f, built], expected["wgmma"].get(f.name, {}))
    ] + [
        error
        for f, rule in exact.items()
        for error in check_exact(f.name, code[f, built], code[f, unfused], rule)
    ]
    kernels = {f"{f.name}: {name}: " for f in (*hopper, *exact) for name in code[f, built]}
    return failures, sum(not any(error.startswith(kernel) for error in failures) for kernel in kernels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, nargs="?", default=ROOT / "build", help="the build folder")
    parser.add_argument("--sources", type=Path, default=ROOT / "cuda", help="the folder of the .cu files")
    parser.add_argument("--table", action="store_true", help="print every kernel's figures")
    parser.add_argument(
        "--write", action="store_true", help="renew the products of Hopper's kernels in sass.json"
    )
    options = parser.parse_args()
    try:
        built = json.loads((options.build / "build.json").read_text())
    except FileNotFoundError:
        parser.exit(2, f"check_ptxas.py: {options.build} is no build folder of shoestring; run make build\n")
    if built["cuda"] is None:
        print(
            f"skipped: the CUDA kernels were not built: {built['cuda_note']}\n0 passed, 0 failed, 1 skipped"
        )
        return 0
    architectures = [f"sm_{gpu.removesuffix('a')}" for gpu in built["gpus"] if gpu != "ptx"]
    passed, failed = 0, 0
    for source in sorted(options.sources.rglob("*.cu")):
        log = next(options.build.glob(f"CMakeFiles/*/cuda/*/{source.name}.o.ptxas"), None)
        if log is None:
            failures, rows = [f"{source.name}: {options.build} has no figures of it; run make build"], []
        else:
            failures, rows = check(source, log.read_text(), architectures)
        for name, usage, budget in rows if options.table else ():
            print(
                f"{source.name:28} {name:44} {usage.architecture:7} {usage.registers:4} registers "
                f"{usage.shared:6} shared {usage.stack:4} stack {usage.spills:4} spills   budget: {budget or 'none'}"
            )
        for line in failures:
            print(f"not ok {line}")
        passed += sum(budget is not None and not compare(usage, budget) for _, usage, budget in rows)
        failed += len(failures)
    failures, sound = check_machine_code(options.build, options.sources, options.write)
    for line in failures:
        print(f"not ok {line}")
    print(f"{passed + sound} passed, {failed + len(failures)} failed")
    return 1 if failed or failures else 0


if __name__ == "__main__":
    sys.exit(main())
