"""Changes one line of an emulated instruction at a time. The comparison with CUTLASS must notice each change.

The changed file is written to a temporary folder. The script compiles the objects that include it, links a second
program from them and from the objects of the build, and expects a difference in the named comparison.

    python tests/simt/cutlass/mutate.py [--build DIR] [--only TEXT]    # changes whose description contains TEXT
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))
from mutation import Mutation as Change  # noqa: E402

PROGRAM = "tests/simt/cutlass/cutlass_tests"


@dataclass(frozen=True)
class Mutation(Change):
    """A change, and a text in the name of a comparison that must notice it."""

    noticed_by: str


MUTATIONS = (
    Mutation(
        "mma: registers of a in the order of columns",
        "tests/simt/include/ptx_emulation.h",
        "in.a[upper + 2 * later]",
        "in.a[2 * upper + later]",
        "mma m16n8k16 bf16: fragment a",
    ),
    Mutation(
        "mma: rows of the result swapped",
        "tests/simt/include/ptx_emulation.h",
        "const int upper = i / 2,",
        "const int upper = 1 - i / 2,",
        "mma m16n8k8 tf32: fragment c",
    ),
    Mutation(
        "ldmatrix: the halves of a register swapped",
        "tests/simt/include/ptx_emulation.h",
        "received.value[i][0] | uint32_t{received.value[i][1]} << 16",
        "received.value[i][1] | uint32_t{received.value[i][0]} << 16",
        "ldmatrix x4 trans",
    ),
    Mutation(
        "to_tf32: halves rounded down",
        "tests/simt/include/ptx_emulation.h",
        "__float_as_uint(x) + 0x1000",
        "__float_as_uint(x) + 0xfff",
        "fp32 to tf32",
    ),
    Mutation(
        "wgmma: a swizzle of 64 bytes",
        "tests/simt/wgmma.cpp",
        "at ^ (at >> 7 & 7) << 4",
        "at ^ (at >> 7 & 3) << 4",
        "places of b",
    ),
    Mutation(
        "wgmma: rows of the result swapped",
        "tests/simt/wgmma.cpp",
        "product_a[lane / 4 + e / 2 % 2 * 8]",
        "product_a[lane / 4 + e % 2 * 8]",
        "fragment of the result",
    ),
    Mutation(
        "wgmma: registers of a in the order of columns",
        "tests/simt/wgmma.cpp",
        "wgmma.a[row / 8 + k / 8 * 2]",
        "wgmma.a[row / 8 * 2 + k / 8]",
        "fragment of a",
    ),
    Mutation(
        "wgmma: rows of b (k, n) in another order",
        "tests/simt/wgmma.cpp",
        "k / 8 * stride + k % 8 * 128",
        "k % 2 * stride + k / 2 * 128",
        "b (k, n): places of b",
    ),
    Mutation(
        "descriptor: a stride of 512 bytes",
        "cuda/core/wgmma.h",
        "uint64_t{1024 >> 4} << 32",
        "uint64_t{512 >> 4} << 32",
        "descriptors of steps over the columns",
    ),
    Mutation(
        "descriptor: a panel that is 16 bytes too near",
        "cuda/core/wgmma.h",
        "panel / 16 - 1",
        "panel / 16 - 2",
        "descriptors of steps over the rows",
    ),
    Mutation(
        "descriptor: steps of half the columns",
        "cuda/core/wgmma.h",
        "k % 64 * 2",
        "k % 64",
        "descriptors of steps over the columns",
    ),
    Mutation(
        "tensor copy: the swizzle of the next row",
        "tests/simt/mbarrier.cpp",
        "address ^= (address >> 7 & 7) << 4;",
        "address ^= ((address >> 7) + 1 & 7) << 4;",
        "swizzle of 128 bytes",
    ),
    Mutation(
        "tensor map: another swizzle on a GPU",
        "cuda/core/tensor_map.h",
        "CU_TENSOR_MAP_SWIZZLE_128B",
        "CU_TENSOR_MAP_SWIZZLE_64B",
        "parameters on a GPU",
    ),
    Mutation(
        "tensor map: a box over heads instead of tokens",
        "cuda/attention/attention_hopper.h",
        "box[] = {64, rows, 1, 1}",
        "box[] = {64, 1, rows, 1}",
        "parameters of the attention kernels",
    ),
    Mutation(
        "Philox: the second key grows like the first",
        "csrc/core/philox.h",
        "key1 += 0xbb67ae85u",
        "key1 += 0x9e3779b9u",
        "Philox: 10 rounds",
    ),
    Mutation(
        "Philox: step and index swapped",
        "csrc/core/philox.h",
        "{{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),",
        "{{static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(index),",
        "as cuRAND's seed, subsequence and offset",
    ),
    Mutation(
        "bf16: halves rounded up",
        "tests/simt/include/cuda_bf16.h",
        "(u >> 16 & 1)",
        "1",
        "fp32 to bf16",
    ),
    Mutation(
        "fp16: the elements of a pair swapped",
        "tests/simt/include/cuda_fp16.h",
        "{__float2half_rn(a), __float2half_rn(b)}",
        "{__float2half_rn(b), __float2half_rn(a)}",
        "pairs of fp32 to fp16",
    ),
)


def output_of(*command: str | Path, cwd: Path) -> str:
    """Return what a command prints; raise CalledProcessError if it fails."""
    return subprocess.run(list(map(str, command)), cwd=cwd, check=True, capture_output=True, text=True).stdout


class Build:
    """The objects of the program in a build folder: their commands, and the files that each includes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        output_of("ninja", PROGRAM, cwd=folder)
        # CMake ends a link command with "&& :".
        commands = output_of("ninja", "-t", "commands", "-s", PROGRAM, cwd=folder)
        self.link = commands.strip().splitlines()[-1]
        objects = {word for word in self.link.split() if word.endswith(".o")}
        database = json.loads(output_of("ninja", "-t", "compdb", cwd=folder))
        self.commands = {e["output"]: e["command"] for e in database if e["output"] in objects}
        self.files = {
            name: {
                str((folder / line.strip()).resolve())
                for line in output_of("ninja", "-t", "deps", name, cwd=folder).splitlines()[1:]
                if line.startswith(" ")
            }
            for name in self.commands
        }

    def run_with(self, mutation: Mutation, scratch: Path) -> str:
        """Build the program with a changed file, and return what it prints."""
        source = ROOT / mutation.file
        text = mutation.applied(source.read_text())
        changed = scratch / mutation.file
        changed.parent.mkdir(parents=True)
        changed.write_text(text)
        # The folders of the changed file are searched first, so that its includes find the others as before.
        search = " ".join(
            f"-I{shlex.quote(str(scratch / folder))}" for folder in ("tests/simt/include", "", "csrc")
        )
        link = re.sub(rf"-o {re.escape(PROGRAM)}(?=\s)", f"-o {scratch}/program", self.link)
        for name, files in self.files.items():
            if str(source.resolve()) not in files:
                continue
            replacement = scratch / f"{len(list(scratch.glob('*.o')))}.o"
            command = self.commands[name].replace(f"-o {name}", f"-o {replacement}")
            command = re.sub(r"-MD|-MT \S+|-MF \S+", "", command)
            # The changed .cpp file includes headers beside the original.
            command = command.replace(f"-c {source}", f"-I{source.parent} -c {changed}")
            command = re.sub(r"(?<=\s)-I", f"{search} -I", command, count=1)
            output_of("sh", "-c", command, cwd=self.folder)
            link = link.replace(f" {name} ", f" {replacement} ")
        output_of("sh", "-c", link, cwd=self.folder)
        return subprocess.run([scratch / "program"], capture_output=True, text=True, check=False).stdout


def main() -> int:
    """Apply each change. Return 1 if a comparison does not notice one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="changes whose description contains TEXT")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="the folder of `make build-tests`")
    options = parser.parse_args()
    build = Build(options.build.resolve())
    survivors = 0
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.what]
    for mutation in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            printed = build.run_with(mutation, Path(scratch))
        differing = [line for line in printed.splitlines() if line.startswith("not ok")]
        noticed = [line for line in differing if mutation.noticed_by in line]
        survivors += not noticed
        print(
            f"{'ok' if noticed else 'not ok'} {mutation.file}: {mutation.what}: {len(differing)} comparisons "
            f"differ{': ' + noticed[0][7:] if noticed else ''}",
            flush=True,
        )
    print(f"{survivors} of {len(chosen)} changes were not noticed")
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
