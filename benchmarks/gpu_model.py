"""Predict the time of the CUDA kernels from their machine code, and print it beside measured times.

    python -m benchmarks.gpu_model                  # the table for the H200, beside its measured times
    python -m benchmarks.gpu_model --gpu A100 4090  # predictions only

The model is a roofline. The time of a kernel is that of its slowest resource:

- ``memory``: bytes by the operator's formula, over the published bandwidth times ``COPY``.
- ``FMA``, ``ALU``, ``XU``, ``FP64``, ``LSU``, ``issue``: instructions by pipe, over the pipe's rate. The busiest SM
  counts: it has ceil(blocks / SMs) blocks.
- ``stores``: 32-byte sectors that store instructions touch, at one sector per clock and SM. A store of 2 bytes
  per lane touches as many sectors as one of 16 bytes if lanes are 16 bytes apart.
- ``chain``: trips of a loop, one after the other. In a trip, a group of threads that a barrier joins (or a warp,
  without barriers) waits for memory, and then computes and stores. Nothing of the same group overlaps with this.
  Other groups do, as many as registers, shared memory and threads allow (occupancy). Groups come in waves.
- ``host``: calls of PyTorch's operators, which the host issues one after the other.

Instructions are counted on the path through the SASS that has the fewest instructions and executes what the
catalogue (gpu_kernels.py) requires of a thread, such as 4 loads of 16 bytes per trip. Code that a plain call skips, for
edges, biases or slow divisions, is therefore not counted. Trip counts, also of loops that depend on data, are
stated in the catalogue. Caches other than by formula, bank conflicts and instruction fetch are not modelled.
"""

import argparse
import contextlib
import hashlib
import heapq
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
import sass  # noqa: E402

from benchmarks.gpu_kernels import Case, Kernel, catalogue  # noqa: E402

# Share of the published memory bandwidth that a copy reaches: 4.27 of 4.8 TB/s on the H200 (results/nvidia-h200.json).
COPY = 0.89
# Share of the published tensor core rate that a large product reaches: 775 of 989 TFLOP/s on the H200.
PRODUCT = 0.78
# Share of the published rates of pipes and issue slots that kernels reach: 50.6 of 67 TFLOP/s for a large product in
# fp32 on the H200. The clock falls below its boost under load, and no schedule fills every slot.
ISSUED = 0.75
# Seconds of the host per operator call of eager PyTorch, as Adafactor (33 calls) and CAME (46) have on the H200's
# machine: 9.2 and 7.7 microseconds, for each kind of state. It is a property of the host.
HOST = 8e-6
# Seconds from the end of a kernel to the full speed of the next. A copy of 43 to 270 MB takes 3.2 to 3.3 microseconds
# longer than its bytes at 4.27 TB/s (results/nvidia-h200.json, quantize).
START = 3.2e-6
# A measured time above SLOW times the prediction is marked, and a prediction above FAR times the bound by bytes
# and products.
SLOW, FAR = 1.5, 2.0
GRANULE = 256  # registers are allocated to a warp in units of 256
WARP = 32


@dataclass(frozen=True)
class Device:
    """Published figures of a GPU.

    Sources: NVIDIA's data sheets and architecture papers of T4 (Turing), A100 80 GB SXM (Ampere), GeForce RTX 4090
    (Ada), H100 SXM and H200 SXM (Hopper); the CUDA C++ Programming Guide, tables of arithmetic throughput and of
    technical specifications per compute capability. Rates are lanes per clock and SM.
    """

    architectures: tuple[str, ...]  # code that it runs, the best first
    sms: int
    fp32: float  # FLOP/s
    tensor: float  # FLOP/s in bf16, dense; fp16 on the T4
    bandwidth: float  # bytes/s
    fma: int
    fp64: int
    lsu: int
    threads: int  # per SM
    blocks: int
    shared: int  # bytes per SM
    alu: int = 64
    xu: int = 16
    registers: int = 65536

    @property
    def clock(self) -> float:
        """The clock that the published fp32 rate implies."""
        return self.fp32 / (2 * self.fma * self.sms)

    def rate(self, pipe: str) -> float:
        """Return the lanes per clock and SM of a pipe."""
        if pipe == "stores":
            return 1.0  # sectors, not lanes
        if pipe == "tensor":
            return PRODUCT * self.tensor / (self.sms * self.clock)  # operations, not lanes
        return ISSUED * (4 * WARP if pipe == "issue" else getattr(self, pipe.lower()))


DEVICES = {
    "T4": Device(("sm_75",), 40, 8.1e12, 65e12, 320e9, 64, 2, 16, 1024, 16, 64 << 10),
    "A100": Device(("sm_80",), 108, 19.5e12, 312e12, 2039e9, 64, 32, 32, 2048, 32, 164 << 10),
    "4090": Device(
        ("sm_89", "sm_86", "sm_80"), 128, 82.6e12, 165.2e12, 1008e9, 128, 2, 16, 1536, 24, 100 << 10
    ),
    "H100": Device(("sm_90a", "sm_90"), 132, 67e12, 989.4e12, 3350e9, 128, 64, 32, 2048, 32, 228 << 10),
    "H200": Device(("sm_90a", "sm_90"), 132, 67e12, 989.4e12, 4800e9, 128, 64, 32, 2048, 32, 228 << 10),
}

# The pipe of an instruction, by the beginning of its opcode; the first match counts. Others, such as branches,
# barriers and constant loads, take only an issue slot.
PIPES = tuple(
    (re.compile(opcodes), pipe)
    for opcodes, pipe in (
        (r"U[A-Z]", "issue"),
        (r"D(FMA|MUL|ADD|SETP|MNMX)", "FP64"),
        (r"(FFMA|FMUL|FADD|IMAD|HFMA2|HADD2|HMUL2|FSWZADD)", "FMA"),
        (r"(MUFU|I2F\.|I2F$|F2I|F2F\.|FRND|POPC|FLO|BREV)", "XU"),
        (r"(LD|ST|ATOM|RED|SHFL|MATCH)(?!C)", "LSU"),
        (r"(IADD|VIADD|LEA|LOP|SHF|SHL|SHR|ISETP|FSETP|FSEL|SEL|FMNMX|IMNMX|VIMNMX|PRMT|MOV|PLOP|F2FP|I2FP|IABS|FCHK|"
         r"SGXT|BMSK|R2P|P2R|HSETP2|HMNMX2|CS2R|VABSDIFF|LOP3|I2I|IDP)", "ALU"),
    )
)  # fmt: skip
# Products in tensor cores: HGMMA.64x128x16 of a warpgroup, HMMA.16816 of a warp (rows, columns 8, depth).
PRODUCTS = re.compile(r"HGMMA\.64x(\d+)x16|HMMA\.(16)8(\d+)")
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def width(opcode: str) -> int:
    """Return the bytes per lane of a load or store."""
    return next((WIDTHS[part] for part in opcode.split(".")[1:] if part in WIDTHS), 4)


def work(opcode: str, pieces: dict[int, int]) -> Iterator[tuple[str, float]]:
    """Yield (pipe, lanes) of one instruction of a warp, and the sectors of a store.

    A memory instruction takes a pass of 32 lanes for each 128 bytes between its first and its last byte.
    `pieces` maps the width of a store to the distance of neighbouring lanes, if these differ.
    """
    yield "issue", WARP
    if product := PRODUCTS.match(opcode):
        # a warp executes a quarter of a warpgroup's product, which has 64 rows
        rows = 16 if product[1] else int(product[2])
        yield "tensor", 2.0 * rows * (int(product[1]) * 16 if product[1] else 8 * int(product[3]))
        return
    pipe = next((pipe for match, pipe in PIPES if match.match(opcode)), "issue")
    if pipe == "issue":
        return
    apart = width(opcode) if opcode.startswith(("LDG", "STG")) else 4
    if opcode.startswith("STG"):
        apart = min(32, pieces.get(apart, apart))
        yield "stores", apart
    yield pipe, WARP * max(1.0, apart / 4)


@dataclass
class Code:
    """What a kernel's machine code says: registers, static shared bytes, and opcodes for 1 and for 2 trips."""

    registers: int
    shared: int
    one: Counter[str]
    two: Counter[str]

    def of_trip(self, kernel: Kernel) -> Counter[str]:
        """Return the opcodes of a trip."""
        return self.two - self.one if kernel.trips > 1 else self.one

    def opcodes(self, trips: float) -> dict[str, float]:
        """Return how often a thread executes each opcode. Beyond two trips, each adds what the second added."""
        return {
            op: max(0.0, self.one[op] + (trips - 1) * (self.two[op] - self.one[op]))
            for op in self.one | self.two
        }


def amount(opcode: str, wanted: str) -> int:
    """Return what an instruction adds to a requirement: 1 if its opcode matches, or the bytes it moves per lane."""
    matched = re.match(wanted.removeprefix("bytes "), opcode) is not None
    return matched * (width(opcode) if wanted.startswith("bytes ") else 1)


class Graph:
    """The straight pieces of a kernel's code, and which may follow which.

    On sm_80, ptxas also jumps by calls that do not return, so a call may lead to its target. A path into a function
    that returns ends at its RET, so such functions do not count.
    """

    def __init__(self, code: list[sass.Instruction], want: dict[str, int]) -> None:
        self.goal = tuple(want.values())
        following = sass.successors(code)
        at = {i.address: n for n, i in enumerate(code)}
        for n, i in enumerate(code):
            if i.opcode.startswith("CALL") and (target := sass.TARGET.search(i.operands)):
                following[n] += [at[int(target[1], 16)]] if int(target[1], 16) in at else []
        starts = {0} | {
            after
            for n, afters in enumerate(following)
            for after in afters
            if after != n + 1 or len(afters) > 1 or code[n].opcode == "EXIT"
        }
        amounts = [tuple(amount(i.opcode, op) for op in want) for i in code]
        # by the first instruction: the end, what the piece adds to the requirements, what follows, whether it exits
        self.pieces = {}
        for start in starts:
            end = start
            while code[end].opcode != "EXIT" and following[end] == [end + 1] and end + 1 not in starts:
                end += 1
            found = tuple(map(sum, zip(*amounts[start : end + 1], strict=True)))
            self.pieces[start] = (end + 1, found, following[end], code[end].opcode == "EXIT")
        # targets of jumps backwards
        self.loops = {after for n, afters in enumerate(following) for after in afters if after <= n}

    def shortest(self, first: int, back: bool, most: float = math.inf) -> list[int] | None:
        """Return the fewest instructions from `first` to EXIT, or with `back` to `first`, that meet all requirements.

        Returns None if there is no such path of less than `most` instructions.
        """
        start = (first, (0,) * len(self.goal))
        best, before = {start: 0}, {}
        heap = [(0, start)]
        while heap:
            length, state = heapq.heappop(heap)
            if length > best[state]:
                continue
            begin, had = state
            end, found, following, exits = self.pieces[begin]
            has = tuple(min(a + b, g) for a, b, g in zip(had, found, self.goal, strict=True))
            if has == self.goal and (first in following if back else exits):
                path = [range(begin, end)]
                while state in before:
                    state = before[state]
                    path.append(range(state[0], self.pieces[state[0]][0]))
                return [n for part in reversed(path) for n in part]
            total = length + end - begin
            for after in following:
                reached = (after, has)
                if total < min(best.get(reached, math.inf), most):
                    best[reached], before[reached] = total, state
                    heapq.heappush(heap, (total, reached))
        return None


def _is_part(opcode: str, kernel: Kernel) -> bool:
    """Return whether a store of 4 bytes or less leaves a gap to the next lane's."""
    size = width(opcode)
    return opcode.startswith("STG") and size <= 4 and size < kernel.pieces.get(size, 0)


def shortest_path(code: list[sass.Instruction], want: dict[str, int]) -> list[int] | None:
    """Return the indices of the fewest instructions from the start to EXIT that include those of `want`.

    `want` maps regular expressions for opcodes to numbers of executions, or to bytes per lane if they begin with
    "bytes ". Returns None if there is no such path. Predicated instructions count, because they take issue slots.
    """
    return Graph(code, want).shortest(0, back=False)


def shortest_loop(code: list[sass.Instruction], want: dict[str, int]) -> list[int] | None:
    """Return the indices of the fewest instructions of a way round a loop, like ``shortest_path``."""
    graph = Graph(code, want)
    found: list[int] | None = None
    for first in sorted(graph.loops):
        path = graph.shortest(first, back=True, most=len(found) if found else math.inf)
        if path and (found is None or len(path) < len(found)):
            found = path
    return found


def read_kernel(
    instructions: list[sass.Instruction], kernel: Kernel, registers: int, shared: int
) -> Code | None:
    """Return the opcodes of a kernel's path for one and for two trips, or None if there is no such path."""

    def path(trips: int) -> list[int] | None:
        wanted = dict.fromkeys((*kernel.once, *kernel.each))
        return shortest_path(
            instructions, {op: kernel.once.get(op, 0) + trips * kernel.each.get(op, 0) for op in wanted}
        )

    def counted(path: list[int]) -> Counter[str]:
        return Counter(instructions[n].opcode for n in path)

    one = path(1)
    if one is None:
        return None
    if kernel.trips <= 1:
        return Code(registers, shared, counted(one), counted(one))
    more = path(2) if kernel.passes > 1 else shortest_loop(instructions, kernel.each)
    if more is None:
        return None
    two = counted(more) if kernel.passes > 1 else counted(one) + counted(more)
    return Code(registers, shared, counted(one), two)


def resident(device: Device, kernel: Kernel, code: Code) -> int:
    """Return the number of blocks that an SM holds at a time (occupancy)."""
    warps = math.ceil(kernel.threads / WARP)
    per_warp = math.ceil(code.registers * WARP / GRANULE) * GRANULE
    shared = code.shared + kernel.shared
    return max(
        1,
        min(
            device.blocks,
            device.threads // kernel.threads,
            device.registers // per_warp // warps,
            device.shared // shared if shared else device.blocks,
        ),
    )


def kernel_clocks(device: Device, kernel: Kernel, code: Code) -> dict[str, float]:
    """Return the clocks that each resource of the SMs needs for a launch."""
    warps = math.ceil(kernel.threads / WARP)
    lanes: Counter[str] = Counter()
    for opcode, times in code.opcodes(kernel.trips).items():
        for pipe, amount in work(opcode, kernel.pieces):
            lanes[pipe] += times * amount
    # clocks of an SM per warp, by pipe
    warp = {pipe: amount / device.rate(pipe) for pipe, amount in lanes.items()}
    busiest = (
        math.ceil(kernel.count / device.sms) if kernel.count < 64 * device.sms else kernel.count / device.sms
    )
    clocks = {pipe: each * warps * busiest for pipe, each in warp.items()}
    blocks = resident(device, kernel, code)
    own = warps if kernel.block else 1  # warps that go together
    busy = max(each for pipe, each in warp.items() if pipe != "stores") + warp.get("stores", 0.0)
    waves = max(1.0, busiest / blocks)
    trips = max(1.0, kernel.trips)
    clocks["chain"] = waves * (math.ceil(trips) * kernel.waits + own * busy)
    return clocks


def predict(device: Device, case: Case, codes: dict[Kernel, Code] | list[Code]) -> dict[str, float]:
    """Return the seconds that a case needs of each resource. Its time is the largest of them.

    The kernels of a case run one after the other, so their seconds are added.
    """
    found: Counter[str] = Counter()
    for kernel, code in zip(case.kernels, codes, strict=True):
        for resource, clocks in kernel_clocks(device, kernel, code).items():
            found[resource] += clocks / device.clock
    found["memory"] = case.bytes / (COPY * device.bandwidth)
    if case.products:
        found["products"] = case.products / (PRODUCT * device.tensor)
    if case.flops:
        found["flops"] = case.flops / (PRODUCT * device.tensor)
    if case.calls:
        found["host"] = case.calls * HOST
    return dict(found)


# ---- Reading the library, and the table


def resources(program: str, library: Path, architecture: str) -> dict[str, tuple[str, int, int]]:
    """Return architecture, registers per thread and static shared bytes of each kernel, by its mangled name."""
    text = subprocess.run(
        [program, "-res-usage", "-arch", architecture, library], capture_output=True, text=True, check=False
    ).stdout
    return {
        found[1]: (architecture, int(found[2]), int(found[3]))
        for found in re.finditer(r"Function (\S+):\s+REG:(\d+) .*?SHARED:(\d+)", text)
    }


def read_library(library: Path, device: Device, cases: list[Case]) -> dict[str, Code]:
    """Return the code of each kernel of the cases, by its symbol and requirements (``key``).

    Disassembles only these kernels, and keeps the result beside the library, for this library and these sources.
    Kernels that the library has no code of, or no path through it as required, are left out.

    Raises:
        RuntimeError: no disassembler was found, or the library has no code for the device.
    """
    stamp = library.stat()
    state = hashlib.sha256(
        f"{library.resolve()} {stamp.st_size} {stamp.st_mtime_ns} {device.architectures}".encode()
    )
    for source in (__file__, sass.__file__, ROOT / "benchmarks/gpu_kernels.py"):
        state.update(Path(source).read_bytes())
    cache = library.parent / f"gpu_model-{device.architectures[0]}.json"
    before, kept = json.loads(cache.read_text()) if cache.exists() else ("", {})
    if before != state.hexdigest():
        kept = {}
    wanted = {key(kernel): kernel for case in cases for kernel in case.kernels}
    if missing := {name: kernel for name, kernel in wanted.items() if name not in kept}:
        kept |= _read(library, device, missing)
        with contextlib.suppress(OSError):  # the folder may be read-only
            cache.write_text(json.dumps([state.hexdigest(), kept]) + "\n")
    return {
        name: Code(registers, shared, Counter(one), Counter(two))
        for name in wanted
        if (found := kept[name])
        for registers, shared, one, two in [found]
    }


def _read(library: Path, device: Device, wanted: dict[str, Kernel]) -> dict[str, list | None]:
    """Return the fields of each kernel's Code, or None for a kernel without code or path."""
    program = sass.disassembler()
    if program is None:
        raise RuntimeError("no cuobjdump was found in PATH, CUDA_HOME or Triton's package")
    known: dict[str, tuple[str, int, int]] = {}
    for architecture in reversed(device.architectures):
        known |= resources(program, library, architecture)
    if not known:
        raise RuntimeError(f"{library} has no code for {' or '.join(device.architectures)}")
    symbols = {}
    for name, kernel in wanted.items():
        matching = [symbol for symbol in known if re.search(kernel.symbol, symbol)]
        if len(matching) > 1:
            raise RuntimeError(f"{kernel.symbol}: expected one kernel, found {matching}")
        if matching:
            symbols[name] = matching[0]

    def listing(symbol: str) -> list[sass.Instruction]:
        text = subprocess.run(
            [program, "-sass", "-arch", known[symbol][0], "-fun", symbol, library],
            capture_output=True, text=True, check=False,
        ).stdout  # fmt: skip
        return next(iter(sass.functions(text).values()))

    each = list(dict.fromkeys(symbols.values()))
    with ThreadPoolExecutor() as pool:
        code = dict(zip(each, pool.map(listing, each), strict=True))
    found: dict[str, list | None] = dict.fromkeys(wanted)
    for name, symbol in symbols.items():
        if read := read_kernel(code[symbol], wanted[name], *known[symbol][1:]):
            found[name] = [read.registers, read.shared, read.one, read.two]
    return found


def key(kernel: Kernel) -> str:
    """Return what the code of a kernel depends on, as a text."""
    return f"{kernel.symbol} {kernel.each} {kernel.once} {kernel.trips > 1} {kernel.passes}"


@dataclass(frozen=True)
class Row:
    """A row of the table: a case, its prediction, and what was measured, if anything."""

    case: Case
    seconds: dict[str, float]  # by resource
    measured: float | None
    peers: dict[str, float]
    split: bool = False  # whether lanes store vectors in four or more parts of 4 bytes or less

    @property
    def bound(self) -> str:
        """The slowest resource, without the products of a library."""
        return max((s, resource) for resource, s in self.seconds.items() if resource != "products")[1]

    @property
    def predicted(self) -> float:
        slowest = self.seconds[self.bound] + (0 if self.bound == "host" else self.case.launches * START)
        return self.seconds.get("products", 0.0) + slowest

    @property
    def least(self) -> float:
        """The time that bytes and products alone need."""
        return self.seconds.get("products", 0.0) + max(self.seconds["memory"], self.seconds.get("flops", 0.0))

    @property
    def marks(self) -> str:
        """Return what looks slow: the measured time beside the prediction, or the prediction beside its bound."""
        slower = self.measured is not None and self.measured > SLOW * self.predicted
        far = self.predicted > FAR * self.least
        return ", ".join(
            ["slower than predicted"] * slower
            + [f"{self.bound} takes {self.predicted / self.least:.1f} times"] * far
            + ["vectors are stored in parts"] * self.split
        )


def rows(device: Device, cases: list[Case], codes: dict[str, Code], tables: list[dict]) -> list[Row]:
    """Return a row for each case of which the library has the kernels. `tables` are those of a results file."""
    found = []
    for case in cases:
        if any(key(kernel) not in codes for kernel in case.kernels):
            continue
        measured = {
            row["name"]: row["seconds"] for t in tables if t["title"] == case.table for row in t["rows"]
        }
        peers = {
            name: seconds
            for name, seconds in measured.items()
            if not name.startswith(("shoestring", "limit"))
        }
        code = [codes[key(kernel)] for kernel in case.kernels]
        split = any(
            sum(n for op, n in each.of_trip(kernel).items() if _is_part(op, kernel)) >= 4
            for kernel, each in zip(case.kernels, code, strict=True)
        )
        found.append(Row(case, predict(device, case, code), measured.get(case.row), peers, split))
    return found


def text_of(found: list[Row]) -> str:
    """Return the table as text: milliseconds, and the share of the bound by bytes and products."""
    lines = [
        f"{'kernel and problem':72} {'predicted':>9} {'bound by':>9} {'of bound':>8} {'measured':>9} {'/ pred.':>7}"
        "  others, times measured"
    ]
    for row in found:
        name = f"{row.case.table.removesuffix(', forward + backward')}: {row.case.row.removeprefix('shoestring ')}"
        line = f"{name:72} {row.predicted * 1e3:9.4f} {row.bound:>9} {row.least / row.predicted:8.2f}"
        if row.measured is not None:
            line += f" {row.measured * 1e3:9.4f} {row.measured / row.predicted:7.2f}  "
            line += ", ".join(f"{peer} {s / row.measured:.2f}" for peer, s in row.peers.items())
        lines.append(line.rstrip() + (f"  <- {row.marks}" if row.marks else ""))
    return "\n".join(lines)


def find_library() -> Path | None:
    """Return the library with CUDA kernels of the build or of the package, if there is one."""
    places = (ROOT / "build", ROOT / "python/shoestring/lib")
    return next((p / "libshoestring_cuda.so" for p in places if (p / "libshoestring_cuda.so").exists()), None)


def device_of(gpu: str) -> str | None:
    """Return the key in DEVICES of a GPU's name, such as "NVIDIA GeForce RTX 4090"."""
    words = re.split(r"[^0-9A-Za-z]+", gpu.upper())
    return next((name for name in DEVICES if name in words), None)


def tables_of(results: Path) -> list[dict]:
    """Return the tables of a results file."""
    return [
        table for benchmark in json.loads(results.read_text())["benchmarks"] for table in benchmark["tables"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gpu", nargs="+", default=["H200"], help=f"names that contain one of {', '.join(DEVICES)}"
    )
    parser.add_argument("--library", type=Path, default=find_library(), help="libshoestring_cuda.so")
    parser.add_argument("--only", nargs="+", default=[], help="benchmarks whose names begin so")
    parser.add_argument(
        "--results", type=Path, help="only rows that this file of make gpu-check has measured"
    )
    options = parser.parse_args()
    if options.library is None:
        parser.exit(2, "gpu_model: --library: no libshoestring_cuda.so was found; run make build\n")
    cases = catalogue()
    for gpu in options.gpu:
        name = device_of(gpu)
        if name is None:
            parser.exit(2, f"gpu_model: --gpu: expected one of {', '.join(DEVICES)}, received {gpu}\n")
        results = options.results or ROOT / f"benchmarks/results/nvidia-{name.lower()}.json"
        try:
            codes = read_library(options.library, DEVICES[name], cases)
        except RuntimeError as reason:
            parser.exit(2, f"gpu_model: {reason}\n")
        found = rows(DEVICES[name], cases, codes, tables_of(results) if results.exists() else [])
        shown = [
            row
            for row in found
            if (not options.results or row.measured is not None)
            and (not options.only or row.case.benchmark.startswith(tuple(options.only)))
        ]
        print(f"{name}: predicted and measured times in ms")
        print(text_of(shown))
        if len(found) < len(cases):
            print(
                f"{len(cases) - len(found)} problems were left out: the library has no such kernel for this GPU"
            )
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
