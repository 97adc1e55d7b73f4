"""Reads machine code of kernels (SASS) for check_ptxas.py, and finds what must not be in it.

``cuobjdump -sass`` prints a line for each instruction. An instruction has an address, a predicate such as
``@!P0``, an opcode with its modifiers, and operands::

    /*1d90*/                   HGMMA.64x64x16.F32 R24, gdesc[UR8], RZ, !UPT ;

Products of a warpgroup (wgmma) are HGMMA instructions. The last one of a group has the operand ``gsb0``.
``WARPGROUP.DEPBAR.LE gsb0, 0x1`` waits until at most one group is under way.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
REGISTER = re.compile(r"(?<![A-Z])R(\d+)")
PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16\.F32(\.BF16)?")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
MOST_GROUPS = 8
ARITHMETIC = ("FFMA", "FMUL", "FADD", "DFMA", "DMUL", "DADD")
# Instructions whose first operand is not a register that they write.
NO_RESULT = re.compile(
    r"ST|RED|BAR|SYNCS|UTMA|EXIT|BRA|MEMBAR|FENCE|ISETP|FSETP|DSETP|LOP3\.LUT P|R2UR|VOTEU"
)


@dataclass(frozen=True)
class Instruction:
    """One line of SASS."""

    address: int
    predicate: str | None
    opcode: str
    operands: str

    @property
    def text(self) -> str:
        return f"{self.opcode} {self.operands}".strip() + f" at {self.address:#06x}"


def disassembler() -> str | None:
    """Return cuobjdump of the CUDA toolkit or of Triton's package, or None.

    It runs nvdisasm, which lies beside it.
    """
    found = shutil.which("cuobjdump")
    if found is None and "CUDA_HOME" in os.environ:
        found = shutil.which(Path(os.environ["CUDA_HOME"]) / "bin/cuobjdump")
    if found is None and (triton := importlib.util.find_spec("triton")) and triton.origin:
        found = shutil.which(Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump")
    return found


def disassemble(program: str, file: Path, architecture: str) -> str:
    """Return the SASS of an object file for one architecture, or a text without kernels if there is none."""
    return subprocess.run(
        [program, "-sass", "-arch", architecture, file], capture_output=True, text=True, check=False
    ).stdout


def functions(sass: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel by its mangled name."""
    found = {}
    for part in sass.split("Function : ")[1:]:
        name, _, code = part.partition("\n")
        found[name.strip()] = [Instruction(int(m[1], 16), m[2], m[3], m[4]) for m in LINE.finditer(code)]
    return found


def products(code: list[Instruction]) -> list[str]:
    """Return the wgmma products of a kernel: shape and type, the place of a, and the order of b."""
    found = set()
    for i in code:
        if match := PRODUCT.match(i.opcode):
            a, b = i.operands.split(", ")[1:3]
            where = "shared memory" if a.startswith("gdesc") else "registers"
            if a.startswith("gdesc"):  # one operand then holds both descriptors
                b = a
            transposed = "".join(f", {x} transposed" for x in "ab" if f".tnsp{x.upper()}" in b)
            kind = "bf16" if match[2] else "fp16"
            found.add(f"m64n{match[1]}k16 {kind}, a in {where}{transposed}")
    return sorted(found)


def arithmetic(code: list[Instruction]) -> Counter[str]:
    """Count multiplications, additions and their fusions, in fp32 and fp64."""
    return Counter(op for i in code if (op := i.opcode.split(".")[0]) in ARITHMETIC)


def fused(code: list[Instruction], apart: list[Instruction], allowed: dict[str, int]) -> str | None:
    """Compare the arithmetic of a kernel with that of its build with ``-fmad=false``; return a message or None.

    `allowed` limits how many fusions of each kind the kernel may have.
    """
    ours, theirs = arithmetic(code), arithmetic(apart)
    changed = {op: (theirs[op], ours[op]) for op in ARITHMETIC if ours[op] != theirs[op]}
    fusions = {op: ours[op] - theirs[op] for op in ("FFMA", "DFMA")}
    if not changed or (any(fusions.values()) and all(n <= allowed.get(op, 0) for op, n in fusions.items())):
        return None
    return "the compiler fused products and sums: " + ", ".join(
        f"{now} {op}, and {before} with -fmad=false" for op, (before, now) in changed.items()
    )


def local_memory(code: list[Instruction]) -> list[str]:
    """Return the accesses to local memory."""
    return [f"local memory: {i.text}" for i in code if i.opcode.startswith(("LDL", "STL"))]


def _width(i: Instruction) -> int:
    """Return how many registers an operand of this instruction has at most."""
    if ".128" in i.opcode or i.opcode.endswith(".4"):
        return 4
    wide = ".64" in i.opcode or ".WIDE" in i.opcode or i.opcode.endswith(".2")
    return 2 if wide or i.opcode in ("DADD", "DMUL", "DFMA") else 1


def successors(code: list[Instruction]) -> list[list[int]]:
    """Return the indices of the instructions that may follow each instruction, without calls."""
    at = {i.address: n for n, i in enumerate(code)}
    following = []
    for n, i in enumerate(code):
        after = [n + 1] if n + 1 < len(code) else []
        always = i.predicate in (None, "PT")
        target = TARGET.search(i.operands)
        if i.opcode.split(".")[0] in ("EXIT", "RET") and always:
            after = []
        elif i.opcode.startswith(("BRA", "WARPSYNC.COLLECTIVE")) and target:
            if i.opcode == "BRA" and always and i.operands.startswith("0x"):
                after = []
            if int(target[1], 16) in at:
                after.append(at[int(target[1], 16)])
        following.append(after)
    return following


# A product under way: first accumulator, number of accumulators, first register of a (-1: in shared memory).
Product = tuple[int, int, int]
# The groups that are committed, in order, and the products that are not committed yet.
Pending = tuple[tuple[frozenset[Product], ...], frozenset[Product]]


def _step(i: Instruction, pending: Pending, report: Callable[[str], None]) -> Pending:
    """Return what is under way after an instruction, and report what it may not touch."""
    groups, begun = pending
    under_way = frozenset().union(*groups, begun)
    own = None
    if match := PRODUCT.match(i.opcode):
        d, a = i.operands.split(", ")[:2]
        count = int(match[1]) // 2
        own = (int(d[1:]), count, int(a[1:]) if a.startswith("R") else -1)
    if i.opcode.startswith("WARPGROUP.DEPBAR"):
        most = int(TARGET.search(i.operands)[1], 16)  # type: ignore[index]
        return (groups[len(groups) - most :] if most else ()), begun
    if i.opcode.startswith("CALL") and under_way:
        report(f"{i.text}: a call while a product is under way")
    for position, match in enumerate(REGISTER.finditer(i.operands)):
        first = int(match[1])
        width = _width(i)
        if own is not None:
            width = own[1] if first == own[0] else 4
        written = position == 0 and i.operands.startswith("R") and not NO_RESULT.match(i.opcode)
        for base, count, a in under_way:
            if own is not None and own[:2] == (base, count) and first == base:
                continue  # products add to the same accumulators in order
            if first < base + count and base < first + width:
                report(f"{i.text} touches R{base} to R{base + count - 1}, to which a product is adding")
            if a >= 0 and written and own is None and first < a + 4 and a < first + width:
                report(f"{i.text} writes R{a} to R{a + 3}, which a product is reading")
    if own is not None:
        begun |= {own}
        if "gsb0" in i.operands:
            # In a loop without a wait, groups would add up for ever. No kernel waits for the ninth last.
            while len(groups) >= MOST_GROUPS:
                groups = (groups[0] | groups[1], *groups[2:])
            return (*groups, begun), frozenset()
    return groups, begun


def touched_in_flight(code: list[Instruction]) -> list[str]:
    """Return the instructions that touch registers of wgmma products between their start and the wait.

    Follows every path through the kernel. Accumulators may not be read or written, except by further products
    that add to the same ones. Registers of operand a may not be written.
    """
    if indirect := [i for i in code if i.opcode.startswith(("BRX", "JMX"))]:
        return [f"{indirect[0].text}: a jump whose target is not known"]
    following = successors(code)
    found: dict[str, None] = {}
    start: Pending = ((), frozenset())
    seen = {(0, start)}
    work = [(0, start)] if code else []
    while work:
        n, pending = work.pop()
        after = _step(code[n], pending, lambda text: found.setdefault(text))
        for m in following[n]:
            if (m, after) not in seen:
                seen.add((m, after))
                work.append((m, after))
    return list(found)


def beyond_setmaxnreg(code: list[Instruction]) -> list[str]:
    """Return the instructions that use registers which setmaxnreg has given up, or not yet given.

    The limit of an instruction is the number of the last setmaxnreg on a path to it.
    """
    at = {i.address: n for n, i in enumerate(code)}
    following = successors(code)
    found: dict[str, None] = {}
    for first, change in enumerate(code):
        if not change.opcode.startswith("USETMAXREG"):
            continue
        limit = int(TARGET.search(change.operands)[1], 16)  # type: ignore[index]
        reached, work = {first}, list(following[first])
        while work:
            n = work.pop()
            if n in reached or code[n].opcode.startswith("USETMAXREG"):
                continue
            reached.add(n)
            work += following[n]
            if code[n].opcode.startswith("CALL") and (target := TARGET.search(code[n].operands)):
                work.append(at[int(target[1], 16)])
            for last in _last_registers(code[n]):
                if last >= limit:
                    found.setdefault(f"{code[n].text} uses R{last}, and setmaxnreg left {limit} registers")
    return list(found)


def _last_registers(i: Instruction) -> Iterator[int]:
    """Yield the number of the last register of each operand."""
    match = PRODUCT.match(i.opcode)
    for position, register in enumerate(REGISTER.finditer(i.operands)):
        size = 1
        if match:
            of_a = position == 1 and i.operands.split(", ")[1].startswith("R")
            size = 4 if of_a else int(match[1]) // 2
        elif f"R{register[1]}.64" in i.operands or (position == 0 and not NO_RESULT.match(i.opcode)):
            size = 2 if f"R{register[1]}.64" in i.operands else _width(i)
        yield int(register[1]) + size - 1
