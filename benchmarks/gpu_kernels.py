"""The kernels that the benchmarks launch, with what each thread must execute: the catalogue of gpu_model.py.

Each case names the table and the row of a benchmark, the bytes that the operator must move, and its launches. The
requirements of a kernel, such as 4 loads of 16 bytes per trip, are chosen so that the shortest path through its
machine code is that of a plain call. Sizes of tiles and blocks are those of the launchers in cuda/.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

# Latencies in clocks. Luo et al. (arXiv 2402.13499) measured 466 to 541 for memory and 262 to 273 for the L2
# cache on A100, RTX 4090 and H100. The T4 is assumed alike.
MEMORY_LATENCY, L2_LATENCY = 480, 265
# Clocks from the begin of a fitting step of int4 to the next: a load from the L1 cache (40), 4 shuffles of 23 and an
# addition of 4 each, and two divisions in fp64 of 9 dependent instructions of 8 clocks and 3 conversions of 20.
STEP_LATENCY = 40 + 4 * (23 + 4) + 2 * (9 * 8 + 3 * 20)


@dataclass(frozen=True)
class Kernel:
    """A launch of a kernel.

    Args:
        symbol: regular expression that finds exactly one mangled name.
        each: what a thread executes in a trip at least, as in `want` of shortest_path.
        trips: trips per thread; may be a fraction, as the mean over threads.
        threads: per block.
        count: blocks of the launch.
        once: what a thread executes besides, once.
        block: whether barriers join the threads of a block. Otherwise a warp is on its own.
        waits: clocks that a trip waits for memory.
        pieces: distance in bytes of the stores of neighbouring lanes, by the store's width, where these differ.
        shared: bytes of dynamic shared memory per block.
        passes: loops that a trip is spread over. With 1, a trip is the shortest way round a loop that has `each`.
    """

    symbol: str
    each: dict[str, int]
    trips: float
    threads: int
    count: float
    once: dict[str, int] = field(default_factory=dict)
    block: bool = False
    waits: int = MEMORY_LATENCY
    pieces: dict[int, int] = field(default_factory=dict)
    shared: int = 0
    passes: int = 1


@dataclass(frozen=True)
class Case:
    """A row of a benchmark: its table and name, bytes to move, kernels, and calls of operators by the host."""

    benchmark: str
    table: str
    row: str
    bytes: float
    kernels: tuple[Kernel, ...] = ()
    products: float = 0  # operations of matrix products by a library, before or after the kernels
    flops: float = 0  # operations of products in tensor cores by the kernels themselves, for the bound
    launches: int = 1
    calls: int = 0  # of operators by the host, if these are many


LDG16, STORED = r"LDG\b.*\.128", "bytes STG"
VECTOR = {
    2: 16,
    4: 16,
    8: 16,
}  # lanes that store vectors of 16 bytes are 16 bytes apart, however these are split
KINDS = {"float32": ("f", 4), "bfloat16": (r"13__nv_bfloat16", 2)}
# Bytes of a moment per element, by the kind of state (benchmarks/optim/bench_optim.py).
MOMENT_BYTES = {"8bit": 260 / 256, "4bit": 148 / 256, "bf16": 2.0, "fp32": 4.0}
STATES = {"8bit": "EightBitState", "4bit": "FourBitState", "bf16": "BFloat16State", "fp32": "FloatState"}


def step_kernel(
    rule: str, state: str, dtype: str, elements: int, moments: int, long: int, roots: int
) -> Kernel:
    """Return the launch of an optimizer's step. A warp has 8 trips, each of 256 elements, 8 per lane.

    `long` moments are bf16 if others are codes. `roots` is the number of special functions per element.
    """
    single = 2 if dtype == "float32" else 1  # vectors of 16 bytes of the weights, and of the gradients
    coded = moments - long if state in ("8bit", "4bit") else 0
    wide = (moments - coded) * (2 if state == "fp32" else 1)  # vectors of the other moments
    codes = {"8bit": 8, "4bit": 4}.get(state, 0)  # bytes of a lane's codes
    each = {
        LDG16: 2 * single + wide,
        r"LDG\b.*" + (r"\.64" if state == "8bit" else r"(?!.*(64|128))"): coded,
        STORED: 16 * (single + wide) + codes * coded,
        "MUFU": 8 * roots,
        # rounding pairs to bf16 tells the loop for bf16 weights from that for fp32 weights
        "F2FP": 4 * (dtype == "bfloat16"),
    }
    # Lanes store vectors of 8 fp32 numbers in two halves, 32 bytes from lane to lane. Lanes with 8 bf16 weights are
    # 16 bytes apart. With 8-bit state, half of the stores of 8 bytes are codes, 8 bytes apart.
    pieces = {16: 32} if dtype == "float32" or state == "fp32" else {}
    if dtype == "bfloat16":
        pieces |= {2: 16, 8: 12 if state == "8bit" else 16}
    return Kernel(
        rf"4stepINS0_\d+{STATES[state]}INS_7kernels\d+{rule}RuleE",
        {op: times for op, times in each.items() if times},
        8,
        256,
        math.ceil(elements / (256 * 64)),
        pieces=pieces,
    )


def optimizers() -> Iterator[Case]:
    size, layer = 1000 << 20, 4096 * 4096
    rules = (
        ("AdamW", "AdamW, one tensor of 1000 Mi", size, 2, 0, 2, ("float32", "bfloat16")),
        ("Lion", "Lion, 4096 x 4096", layer, 1, 0, 0, ("float32",)),
        ("SGD", "SGD with momentum, 4096 x 4096", layer, 1, 0, 0, ("float32",)),
        ("AdEMAMix", "AdEMAMix, 4096 x 4096", layer, 3, 1, 2, ("float32",)),
        ("ScheduleFreeAdamW", "ScheduleFreeAdamW, 4096 x 4096", layer, 2, 1, 2, ("float32",)),
    )
    for rule, table, elements, moments, long, roots, dtypes in rules:
        for dtype in dtypes:
            for state, each in MOMENT_BYTES.items():
                codes = state in ("8bit", "4bit")
                held = (moments - long) * each + long * (2.0 if codes else each)
                kernel = step_kernel(rule, state, dtype, elements, moments, long, roots)
                moved = elements * (3 * KINDS[dtype][1] + 2 * held)
                yield Case("optim", f"{table}, {dtype}", f"shoestring {state}", moved, (kernel,), launches=2)


def composed() -> Iterator[Case]:
    """Yield the optimizers that are composed of several operators. Passes over the whole parameter count.

    LAMB: AdamW on a zeroed update u, two norms, and the step (csrc/optim/rules/lamb.cpp). Adafactor and CAME compute
    means, products and norms with PyTorch's operators. test_gpu_model.py counts the calls.
    """
    layer, small = 4096 * 4096, 2048 * 2048
    for state, each in MOMENT_BYTES.items():
        # zero u, AdamW on u (read, gradient, write, two moments), norm of the weight and of u, apply u
        moved = layer * (4 + 12 + 4 * each + 4 + 4 + 12)
        yield Case("optim", "LAMB, 4096 x 4096, float32", f"shoestring {state}", moved, launches=15)
        # a dozen passes over arrays of fp32 for either
        yield Case(
            "optim",
            "Adafactor, with a mean, 2048 x 2048, float32",
            f"shoestring {state}",
            small * 48,
            calls=33,
        )
        yield Case("optim", "CAME, 2048 x 2048, float32", f"shoestring {state}", small * 64, calls=46)


def quantisation() -> Iterator[Case]:
    for elements in (1 << 24, 4096 * 14336):
        for dtype, (name, size) in KINDS.items():
            at = f"{elements / 2**20:.4g} Mi elements, {dtype}"
            wide = 16 // size  # elements per vector
            moved, moved8 = elements * (size + 0.5 + 4 / 64), elements * (size + 1 + 4 / 4096)
            for kind, scales in (("NF4", 0), ("int4", 2)):
                kernel = Kernel(
                    rf"dequantize_4bit_cu.*10dequantizeI{name}LNS1_6ScalesE{scales}E",
                    {r"LDG": 8, STORED: 64, "LDS": 4 * wide}, 1, 256, elements / (1024 * wide), block=True, pieces=VECTOR,
                )  # fmt: skip
                row = "shoestring into a given tensor" if kind == "NF4" else "shoestring"
                yield Case("quantize", f"dequantise {kind}, {at}", row, moved, (kernel,))
            kernel = Kernel(
                rf"dequantize_int8_cu.*10dequantizeI{name}Lb1E",
                {r"LDG": 8, STORED: 64, r"I2F": 4 * wide}, 1, 256, elements / (1024 * wide), block=True, pieces=VECTOR,
            )  # fmt: skip
            yield Case("quantize", f"dequantise int8, {at}", "shoestring", moved8, (kernel,))
            # a lane has 32 elements; two look-ups for each
            kernel = Kernel(
                rf"quantize_4bit_cu.*8quantizeI{name}Lb0ELb0E",
                {LDG16: 32 // wide, STORED: 16, "LDS": 64}, 1, 256, elements / 8192, block=True,
            )  # fmt: skip
            yield Case("quantize", f"quantise NF4, {at}", "shoestring", moved, (kernel,))
            kernel = Kernel(
                rf"quantize_int8_cu.*8quantizeI{name}Lb0ELb0E",
                {LDG16: 16 // wide, STORED: 16, "F2I": 16}, 1, 256, elements / 4096, block=True, pieces={1: 8, 2: 8, 4: 8},
            )  # fmt: skip
            yield Case("quantize", f"quantise int8, {at}", "shoestring", moved8, (kernel,))
            # A block of 64 elements has 16 lanes. Nine fitting steps each read 4 elements per lane from the L1
            # cache, clamp them (4 FMNMX each), add five sums over 16 lanes, and divide twice in fp64.
            kernel = Kernel(
                rf"quantize_int4_cu.*8quantizeI{name}Lb0E",
                {"LDG": 4, "FMNMX": 16, "SHFL": 20, "MUFU.RCP64H": 2}, 9, 256, elements / 1024,
                once={"LDG": 8, "FMNMX": 24, "SHFL": 16, "STG": 3}, waits=STEP_LATENCY,
            )  # fmt: skip
            yield Case("quantize", f"quantise int4, {at}", "shoestring", moved, (kernel,))


def losses() -> Iterator[Case]:
    for tokens, classes in ((8192, 50304), (8192, 131072), (4096, 50257)):
        for dtype, (name, size) in KINDS.items():
            # A trip is 16 logits per thread, read from memory in the first pass and from the L2 cache in the second.
            kernel = Kernel(
                rf"_cross_entropy_cu_.*13cross_entropyI{name}(S3_|f)Lb0ELb1E",
                {LDG16: 2 * size, STORED: 16 * size}, classes / (1024 * 16), 1024, tokens,
                block=True, waits=MEMORY_LATENCY + L2_LATENCY, passes=2, pieces=VECTOR,
            )  # fmt: skip
            table = f"{tokens} tokens x {classes} classes, {dtype}, forward + backward"
            yield Case("cross_entropy", table, "shoestring, in place", 2 * size * tokens * classes, (kernel,))
    for tokens, features, classes in ((8192, 4096, 131072), (16384, 4096, 128256), (8192, 2304, 256000)):
        kernel = Kernel(
            r"_linear_cross_entropy_cu_.*13cross_entropyIf13__nv_bfloat16Lb0ELb0E",
            {LDG16: 8, STORED: 32}, classes / (1024 * 16), 1024, tokens,
            block=True, waits=MEMORY_LATENCY + L2_LATENCY, passes=2, pieces={2: 8, 4: 8},
        )  # fmt: skip
        table = f"{tokens} tokens x {features} features x {classes} classes, bfloat16, forward + backward"
        # fp32 logits are read, and their gradients are written in bf16
        yield Case(
            "linear_cross_entropy", table, "shoestring", 6 * tokens * classes, (kernel,),
            products=6 * tokens * features * classes,
        )  # fmt: skip


def layers() -> Iterator[Case]:
    rows, features = 8192, 4096
    for dtype, (name, size) in KINDS.items():
        wide, elements = 16 // size, rows * features
        at = f"{rows} x {features}, {dtype}, forward"
        own = 16 // wide  # vectors of a row per thread
        for layer, reads, writes, parameters in (
            ("rms_norm", 1, 1, 1), ("add_rms_norm", 2, 2, 1), ("layer_norm", 1, 1, 2), ("add_layer_norm", 2, 2, 2),
        ):  # fmt: skip
            kernel = Kernel(
                rf"_norm_cu_.*7forwardI{name}Li{wide}ELNS1_5GroupE1E",
                {LDG16: own * (reads + parameters), STORED: 16 * own * writes}, 1, features // 16, rows, block=True,
                pieces=VECTOR,
            )  # fmt: skip
            yield Case(
                "layers", f"{layer}, {at}", "shoestring", (reads + writes) * size * elements, (kernel,)
            )
        for layer, file, rule, reads, functions in (
            ("swiglu", "swiglu", "Gated", 2, 2), ("geglu", "geglu", "Gated", 2, 0), ("gelu", "geglu", "Ungated", 1, 0),
        ):  # fmt: skip
            kernel = Kernel(
                rf"_{file}_cu_.*7forwardINS_7kernels\d{rule}INS\d_\d(?:Silu|GeluErf)EEE{name}Li{wide}E",
                {LDG16: reads, STORED: 16, "MUFU": functions * wide}, 1, 256, elements / (256 * wide),
                pieces=VECTOR,
            )  # fmt: skip
            yield Case("layers", f"{layer}, {at}", "shoestring", (reads + 1) * size * elements, (kernel,))


def attention() -> Iterator[Case]:
    """Yield attention of 16,384 tokens in sequences of 4096 by the kernels for Hopper, in bf16.

    A warpgroup has 64 rows. The 128 threads that copy tiles are left out. A trip is a tile of keys (or of queries, for
    the gradient of the keys). Its products are wgmma instructions of 16 products deep, its exponentials one per
    score. Shared memory, from the kernels, allows one block per SM.
    """
    batch, tokens = 4, 4096
    bf16 = KINDS["bfloat16"][0]
    for features in (64, 128):
        heads, deep = 2048 // features, features // 16
        blocks, moved = batch * heads * tokens / 128, 2 * batch * tokens * 2048
        queries = 96 if features == 64 else 64  # tile of the gradient of the keys

        def kernel(
            symbol: str,
            tile: int,
            products: int,
            causal: bool,
            features: int = features,
            blocks: float = blocks,
        ) -> Kernel:
            # with a causal mask, half of the tiles, and half a tile on the diagonal
            trips = (tokens / tile + 1) / 2 if causal else tokens / tile
            return Kernel(
                rf"{symbol}I{bf16}Li{features}E", {"HGMMA": products, r"MUFU\.EX2": tile // 2}, trips, 256, blocks,
                waits=0, shared=145 << 10,
            )  # fmt: skip

        for causal in (True, False):
            at = f"{batch} x {heads} heads, {tokens} tokens, d {features}, {'causal' if causal else 'full'}, bfloat16"
            forward = kernel("14hopper_forward", 128, deep + 8, causal)
            flops = 2 * batch * heads * tokens**2 * features / (2 if causal else 1)  # of one product
            yield Case(
                "attention", f"{at}, forward", "shoestring, own", 4 * moved, (forward,), flops=2 * flops
            )
            keys = kernel("_keys_hopper_cu_.*13key_gradients", queries, 2 * deep + queries // 8, causal)
            keys = dataclasses.replace(keys, symbol=keys.symbol + "Lb1ELb1ELb0E")
            rows = kernel("14query_gradient", 96, 2 * deep + 6, causal)
            rows = dataclasses.replace(rows, symbol="_queries_hopper_cu_.*" + rows.symbol)
            yield Case(
                "attention", f"{at}, backward", "shoestring, own", 8 * moved, (keys, rows), flops=5 * flops, launches=3
            )  # fmt: skip


def catalogue() -> list[Case]:
    """Return all cases: the problems of the benchmarks, with the kernels that they launch."""
    return [*optimizers(), *composed(), *quantisation(), *losses(), *layers(), *attention()]
