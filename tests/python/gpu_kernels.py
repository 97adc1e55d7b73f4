"""Print which CUDA kernels each operator launches on each GPU, and how much shared memory they take.

``python gpu_kernels.py`` prints the tables of ``docs/internals/gpus.md``; ``--write`` renews them there, and
``--json`` prints the launches. The emulator reports the properties of a GPU to the host code and logs the
launches without running kernels, so all results are meaningless.
"""

import argparse
import ctypes
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch

import emulator_cases
import shoestring
from build_folder import EMULATOR, REPOSITORY
from optimizer_rules import ADAMW, ADEMAMIX, APPLY, EMA, LION, SCHEDULE_FREE, SGD

PAGE = REPOSITORY / "docs/internals/gpus.md"
BEGIN, END = "<!-- begin: tests/python/gpu_kernels.py -->\n", "<!-- end -->\n"
LARGE = 48 << 10  # more shared memory needs the consent of the driver, which knows the GPU's limit


@dataclass(frozen=True)
class Gpu:
    """A GPU that the emulator knows."""

    name: str
    capability: int
    shared_bytes: int
    multiprocessors: int

    @property
    def architecture(self) -> str:
        """Return the architecture of the machine code that runs on the GPU."""
        return f"sm_{self.capability}{'a' if self.capability == 90 else ''}"


@dataclass(frozen=True)
class Launch:
    """A launch that the emulator has logged."""

    kernel: str
    file: str
    threads: int
    static_bytes: int
    dynamic_bytes: int

    @property
    def name(self) -> str:
        """Return the kernel's name without template arguments."""
        return self.kernel.partition("<")[0]

    @property
    def shared_bytes(self) -> int:
        return self.static_bytes + self.dynamic_bytes


def attention(dtype: torch.dtype, dim: int, **options: object) -> None:
    """Run forward and backward of attention with our own kernels, never those of PyTorch."""
    tensors = [torch.zeros(1, heads, 40, dim, dtype=dtype, requires_grad=True) for heads in (2, 1, 1)]
    out = shoestring.attention(*tensors, deterministic=True, **options)
    out.backward(torch.zeros_like(out))


DIMS = (32, 64, 96, 128, 192, 256)
SHORT = (torch.bfloat16, torch.float16)


def attention_short() -> None:
    starts = torch.tensor([0, 7, 40], dtype=torch.int32)
    for dtype in SHORT:
        for dim in DIMS:
            for options in ({}, {"causal": True, "softcap": 5.0}, {"sinks": torch.zeros(2)}):
                attention(dtype, dim, **options)
        packed = [torch.zeros(40, heads, 64, dtype=dtype, requires_grad=True) for heads in (2, 1, 1)]
        out = shoestring.attention(*packed, cu_seqlens_q=starts, deterministic=True)
        out.backward(torch.zeros_like(out))


def attention_float() -> None:
    for dim in DIMS:
        attention(torch.float32, dim)


def attention_with_options() -> None:
    for dtype in (torch.float32, *SHORT):
        for dim in DIMS:
            attention(dtype, dim, bias=torch.zeros(1, 2, 40, 40, requires_grad=True))
            attention(dtype, dim, alibi_slopes=torch.zeros(2))
            attention(dtype, dim, dropout_p=0.1, seed=torch.tensor([1]))


def optimizers() -> None:
    for rule in (ADAMW, ADEMAMIX, APPLY, EMA, LION, SCHEDULE_FREE, SGD):
        for state in ("8bit", "4bit", "bf16", "fp32"):
            emulator_cases.second_step("cpu", rule, state, "nearest")


def widest_rope() -> None:
    """Run rope with a norm and the widest heads, whose sums of gradients are in shared memory."""
    for dtype in (torch.float32, *SHORT):
        for dim in (64, 256, 1024):
            q, k = (torch.zeros(1, 2, 3, dim, dtype=dtype, requires_grad=True) for _ in range(2))
            weight = torch.zeros(dim, dtype=dtype, requires_grad=True)
            angles = torch.zeros(3, dim // 2, dtype=dtype)
            out, _ = shoestring.rope(q, k, angles, angles, q_weight=weight, k_weight=weight)
            out.backward(torch.zeros_like(out))


def case(run: Callable[[str], object]) -> Callable[[], object]:
    return lambda: run("cpu")


CASES: dict[str, Callable[[], object]] = {
    "`attention`, bf16 and fp16": attention_short,
    "`attention`, fp32": attention_float,
    "`attention` with a bias, ALiBi or dropout": attention_with_options,
    "norms, activations, `rope`, `seeded_dropout`, `moe_route`": lambda: (
        emulator_cases.table_of_cases("cpu"),
        emulator_cases.rope("cpu"),
        widest_rope(),
    ),
    "`moe_sort`": case(emulator_cases.moe_sort),
    "`grouped_linear`": case(emulator_cases.grouped_linear),
    "`moe_experts`": case(emulator_cases.moe_experts),
    "`cross_entropy`": case(emulator_cases.cross_entropy),
    "`linear_cross_entropy`": case(emulator_cases.linear_cross_entropy),
    "`linear_distillation`": case(emulator_cases.linear_distillation),
    "optimizers": optimizers,
    "`quantize_4bit`": case(emulator_cases.quantize_4bit),
    "`dequantize_4bit`": case(emulator_cases.dequantize_4bit),
    "`quantize_int8`, `dequantize_int8`": case(emulator_cases.int8),
    "`fake_quantize`": case(emulator_cases.fake_quantize),
    "8-bit and 4-bit optimizer state": lambda: (
        emulator_cases.quantize_8bit_codes("cpu"),
        emulator_cases.quantize_state_4bit_codes("cpu"),
    ),
    "compressed gradients": case(emulator_cases.compressed_gradients),
}


class Emulator:
    """The emulator's library, with a log of launches."""

    def __init__(self) -> None:
        torch.ops.load_library(str(EMULATOR))
        self.library = ctypes.CDLL(str(EMULATOR))
        self.library.simt_gpus.restype = ctypes.c_char_p
        self.library.simt_take_launches.restype = ctypes.c_char_p
        self.library.simt_set_gpu.restype = ctypes.c_bool

    def rows(self, text: bytes) -> list[list[str]]:
        return [line.split("\t") for line in text.decode().splitlines()]

    def gpus(self) -> list[Gpu]:
        return [Gpu(name, *map(int, numbers)) for name, *numbers in self.rows(self.library.simt_gpus())]

    def launches(self, gpu: Gpu, run: Callable[[], object]) -> list[Launch] | str:
        """Return the launches of a case on a GPU, or the text of the error with which it was refused."""
        assert self.library.simt_set_gpu(gpu.name.encode()), gpu
        self.library.simt_log_launches(True, True)
        try:
            run()
            error = None
        except RuntimeError as refused:
            error = str(refused).splitlines()[0]
        self.library.simt_log_launches(False, False)
        found = [
            Launch(kernel, file, *map(int, numbers))
            for kernel, file, *numbers in self.rows(self.library.simt_take_launches())
        ]
        return found if error is None else error


Found = dict[str, dict[str, list[Launch] | str]]  # by GPU and case


def find(emulator: Emulator) -> Found:
    return {
        gpu.name: {name: emulator.launches(gpu, run) for name, run in CASES.items()}
        for gpu in emulator.gpus()
    }


def cell(found: list[Launch] | str) -> str:
    """Return the kernels by source file, or that the call is refused."""
    if isinstance(found, str):
        return "refused"
    files = dict.fromkeys(launch.file for launch in found)
    return "; ".join(
        f"{', '.join(dict.fromkeys(x.name for x in found if x.file == file))} (`{file}`)" for file in files
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def pages(gpus: list[Gpu], found: Found) -> str:
    """Return the tables: GPUs, operators with a choice, other operators, kernels with much shared memory."""
    properties = [
        [
            gpu.name,
            f"{gpu.capability // 10}.{gpu.capability % 10}",
            gpu.architecture,
            f"{gpu.shared_bytes >> 10} KiB",
            str(gpu.multiprocessors),
            f"{max(x.shared_bytes for case in found[gpu.name].values() if not isinstance(case, str) for x in case) / 1024:.0f} KiB",
        ]
        for gpu in gpus
    ]
    cells = {name: [cell(found[gpu.name][name]) for gpu in gpus] for name in CASES}
    chosen = [name for name in CASES if len(set(cells[name])) > 1]
    alike: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(gpus)):
        alike.setdefault(tuple(cells[name][i] for name in chosen), []).append(i)
    choice = [[name, *(cells[name][same[0]] for same in alike.values())] for name in chosen]
    large: dict[tuple[str, str], list[Launch]] = {}
    for cases in found.values():
        for launches in cases.values():
            for launch in launches if not isinstance(launches, str) else ():
                if launch.shared_bytes > LARGE:
                    large.setdefault((launch.file, launch.name), []).append(launch)
    most = [
        [f"`{name}`", f"`{file}`", f"{max(x.shared_bytes for x in launches) / 1024:.1f} KiB"]
        for (file, name), launches in sorted(large.items())
    ]
    return "\n".join(
        (
            table(
                [
                    "GPU",
                    "compute capability",
                    "machine code",
                    "limit of a block",
                    "multiprocessors",
                    "largest block",
                ],
                properties,
            ),
            table(["operator", *(", ".join(gpus[i].name for i in same) for same in alike.values())], choice),
            table(
                ["operator", "kernels on every GPU"],
                [[name, cells[name][0]] for name in CASES if name not in chosen],
            ),
            table(["kernel", "file", "shared memory of a block, at most"], most),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="renew the tables of the page")
    parser.add_argument(
        "--json", action="store_true", help="print the launches, one list for each GPU and case"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    emulator = Emulator()
    gpus, found = emulator.gpus(), find(emulator)
    if options.json:
        print(
            json.dumps(
                {
                    "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
                    "found": {
                        gpu: {
                            name: x
                            if isinstance(x, str)
                            else [dataclasses.asdict(launch) for launch in dict.fromkeys(x)]
                            for name, x in cases.items()
                        }
                        for gpu, cases in found.items()
                    },
                    "tables": pages(gpus, found),
                }
            )
        )
    elif options.write:
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(BEGIN)] + BEGIN + pages(gpus, found) + text[text.index(END) :])
    else:
        print(pages(gpus, found), end="")


if __name__ == "__main__":
    main()
