"""Makes 21 mistakes, one at a time, that a programmer may make. The tests must notice them.

Each mutation changes one place of a clone of the last commit, which has a build folder of its own. The script first
runs the tests of the changed room, and then the whole tier, until the first failure. A mutation that is reported as
not noticed has passed all tests of the tier.

    python tests/mutations.py [--tier first|second] [--only TEXT]

--tier first     the tests of `make test`, which must notice 14 mutations
--tier second    those of `make test-all` as well, for what the first tier does not notice: all 21
--only TEXT      mutations whose description contains TEXT, without a run of the tests before anything is changed
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from mutation import Mutation as Change

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build-mutations"
TREE = FOLDER / "tree"
BUILT = FOLDER / "built"  # a copy of the build folder of the clone, without a mutation
LEAST = {"first": 14, "second": 21}  # how many mutations the tiers must notice
SECONDS = 2 * 3600  # a run that takes longer hangs
# The variables of `make` for each tier. The mutations are not in CUDA kernels, so the first tier does without them.
BUILD = {
    "first": ["TARGETS=first_tier", "CUDA=0", "CUDA_SUFFICES=.*"],
    "second": ["TARGETS=all", "GPUS=gates", "GPUS_SUFFICE=gates"],
}
NO_TESTS = 5  # the exit code of pytest where all tests of a room are in the other tier
FAILED = re.compile(r".*: FAILED:|(FAILED|ERROR|not ok) |=+ first failure: ")
# How suites name a test that fails: pytest at once and at the end, scripts, Catch2.
NAMES = (r"first failure: (\S+)", r"^(?:FAILED|ERROR) (.+)", r"^not ok (.+)", r"^-{79}\n(.+)$")


class Mutation(Change):
    """A mutation of a file of a room."""

    @property
    def room(self) -> str:
        return Path(self.file).parts[1 if self.file.startswith("csrc") else 2]

    @property
    def is_compiled(self) -> bool:
        return self.file.startswith("csrc")


MUTATIONS = (
    Mutation(
        "optim: AdamW corrects the bias of the second moment with beta1",
        "csrc/optim/rules/adamw_rule.h",
        "bias2 = 1 - pow(beta2, step)",
        "bias2 = 1 - pow(beta1, step)",
    ),
    Mutation(
        "optim: a mean of fewer snapshots than it may have is divided by the number that it may have",
        "csrc/optim/wrappers/averages_core.cpp",
        "sum.div_(static_cast<double>(values_.size()))",
        "sum.div_(static_cast<double>(options_.last()))",
    ),
    Mutation(
        "quantization: int4 does not use the lowest code",
        "csrc/quantization/quantize_int4_simd.cpp",
        "splat(-8)",
        "splat(-7)",
    ),
    Mutation(
        "attention: the window leaves out the farthest key",
        "csrc/attention/attention_simd.cpp",
        "distance < left ?",
        "distance <= left ?",
    ),
    Mutation(
        "layers: backward of interleaved rotary embeddings rotates forwards",
        "csrc/layers/rope_simd.cpp",
        "neighbours(v.value[k]) * (s.value[k] * sign)",
        "neighbours(v.value[k]) * s.value[k]",
    ),
    Mutation(
        "layers: the lanes after a row count in the variance of layer_norm",
        "csrc/layers/norm_simd.cpp",
        "int64_t lane = n - k * kLanes;",
        "int64_t lane = n;",
    ),
    Mutation(
        "core: the heap takes the larger of two limits of its memory",
        "csrc/core/host_heap.cpp",
        "std::min(most_used_ + kSlack, most_resident_)",
        "std::max(most_used_ + kSlack, most_resident_)",
    ),
    Mutation(
        "losses: the gradient of z_loss lacks a factor of 2",
        "csrc/losses/cross_entropy_simd.cpp",
        "2 * z_loss * lse) + upstream->lse;\n  result.scale = 1;\n  if (keep)",
        "z_loss * lse) + upstream->lse;\n  result.scale = 1;\n  if (keep)",
    ),
    Mutation(
        "experts: of equal scores the last one ranks first",
        "csrc/experts/moe_route_simd.cpp",
        "return a > b ||",
        "return a >= b ||",
    ),
    Mutation(
        "gemm: tiles at the edges ignore beta",
        "csrc/gemm/gemm_simd.cpp",
        ": beta * *to + whole[i][j]",
        ": *to + whole[i][j]",
    ),
    Mutation(
        "offload: activations are written to the disk before the host has them",
        "csrc/offload/activation_core.cpp",
        "    copied->synchronize();\n",
        "",
    ),
    Mutation(
        "checkpoint: a plan may not fill its budget",
        "csrc/checkpoint/plan.cpp",
        "s.peak > budget",
        "s.peak >= budget",
    ),
    Mutation(
        "files: bytes after the last tensor are accepted",
        "csrc/files/safetensors_header.cpp",
        "if (end != data)",
        "if (end > data)",
    ),
    Mutation(
        "distributed: the weights of the processes and their average change places in the mix of the two",
        "csrc/distributed/diloco.cpp",
        "at::lerp(averaged, own.to(at::kFloat), alpha)",
        "at::lerp(own.to(at::kFloat), averaged, alpha)",
    ),
    Mutation(
        "runs: the monitor takes busy cores for idle ones beside a busy disk",
        "csrc/runs/monitor_rules.cpp",
        "1 - f.cores() / f.machine.cores;",
        "f.cores() / f.machine.cores;",
    ),
    Mutation(
        "adapters: rsLoRA with a changed base is saved with the scaling of half the rank",
        "python/shoestring/adapters/files.py",
        "(math.sqrt(rank) if own.rslora else rank)",
        "(math.sqrt(own.rank) if own.rslora else rank)",
    ),
    Mutation(
        "blocks: norms of queries and keys lose their offset before a rotation",
        "python/shoestring/blocks/attention.py",
        '{"eps": self.norm_eps, "offset": self.norm_offset}',
        '{"eps": self.norm_eps}',
    ),
    Mutation(
        "data: a closed prefetcher forgets its position",
        "python/shoestring/data/prefetcher.py",
        "self._start = position if start is None else start",
        "self._start = self._start if start is None else start",
    ),
    Mutation(
        "integrations: sliding windows of transformers are one token too wide",
        "python/shoestring/integrations/transformers/attention.py",
        "(window - 1, -1) if window",
        "(window, -1) if window",
    ),
    Mutation(
        "training: the checkpoint before the newest is removed",
        "python/shoestring/training/run/checkpoint.py",
        "checkpoints(run)[:-KEEP]",
        "checkpoints(run)[: 1 - KEEP]",
    ),
    Mutation(
        "cli: every exit code of a measured program but 0 becomes 1",
        "python/shoestring/cli/app.py",
        "return result if isinstance(result, int) else 0",
        "return 1 if result else 0",
    ),
)


def call(*command: str | Path) -> None:
    """Run a command; end the script with its output if it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")


def build(tier: str) -> None:
    """Build and install in the clone what a tier needs, with the options of `make`, but no new environment."""
    call("make", "-C", TREE, "-o", ".venv/.ready", "build", "BUILD=build", "VENV=.venv", *BUILD[tier])


def prepare(tier: str) -> None:
    """Make or update the clone, build it, and keep a copy of its build folder."""
    if not TREE.exists():
        FOLDER.mkdir(exist_ok=True)
        call("git", "clone", "-q", ROOT, TREE)
        # ccache compares paths within the clone. So the clone gets its own .venv, made of hard links, and ccache finds
        # the object files of other clones.
        shutil.copytree(ROOT / ".venv", TREE / ".venv", symlinks=True, copy_function=os.link)
    call("git", "-C", TREE, "fetch", "-q", ROOT, "HEAD")
    call("git", "-C", TREE, "reset", "-q", "--hard", "FETCH_HEAD")
    build(tier)
    shutil.rmtree(BUILT, ignore_errors=True)
    shutil.copytree(TREE / "build", BUILT, symlinks=True)


def first_failure(*command: str | Path) -> str | None:
    """Run suites in the clone, until the one with the first failure ends. Return the name of the test that failed."""
    environment = os.environ | {
        "PATH": f"{TREE / '.venv/bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(TREE / "python"),
        "SHOESTRING_BUILD": str(TREE / "build"),
        "PYTEST_ADDOPTS": "--maxfail=1",
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
    }
    process = subprocess.Popen(
        list(map(str, command)), cwd=TREE, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    limit = threading.Timer(SECONDS, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    printed: list[str] = []
    has_failed = False
    try:
        for line in process.stdout:
            printed.append(line)
            has_failed = has_failed or FAILED.match(line) is not None
            if has_failed and line.startswith("== "):  # the next suite begins
                os.killpg(process.pid, signal.SIGTERM)
                break
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        limit.cancel()
    if not has_failed and code in (0, NO_TESTS):
        return None
    text = "".join(printed)
    found = (re.search(pattern, text, re.M) for pattern in NAMES)
    last = (text.strip().splitlines() or [f"exit code {code}"])[-1]
    return next((match[1] for match in found if match), last)[:160]


def noticed_by(room: str, tier: str) -> str | None:
    """Return the first test of a tier that fails, out of those of a room first."""
    commands: list[list[str | Path]] = []
    files = [*sorted((TREE / "tests/cpp" / room).glob("test_*.cpp")), Path("test_operator_cases.cpp")]
    if tier == "first":
        tags = ",".join(f"[#{file.stem}]" for file in files)  # Catch2 can name tests by their files
        commands.append(["python", "tests/python/write_cases.py"])
        commands.append([TREE / "build/tests/cpp/shoestring_tests", "-a", "-#", tags])
    pytest = ["python", "-m", "pytest", "-n", "2", "--dist", "worksteal", f"--tier={tier}", "-m", "not alone"]
    commands += [[*pytest, f"tests/python/{room}"], ["scripts/test.sh", "build", tier]]
    return next((name for command in commands if (name := first_failure(*command)) is not None), None)


def outcome(mutation: Mutation, tier: str) -> str | None:
    """Apply a mutation, return the test that notices it, and take the mutation back."""
    source = TREE / mutation.file
    text, status = source.read_text(), source.stat()
    source.write_text(mutation.applied(text))
    try:
        build(tier)
        name = noticed_by(mutation.room, "first")
        return noticed_by(mutation.room, "second") if name is None and tier == "second" else name
    finally:
        # With the times of before, nothing has to be built again.
        source.write_text(text)
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
        if mutation.is_compiled:
            shutil.rmtree(TREE / "build")
            shutil.copytree(BUILT, TREE / "build", symlinks=True)


def main() -> int:
    """Apply each mutation. Return 1 if the tests notice too few."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=LEAST, default="first")
    parser.add_argument("--only", default="", metavar="TEXT")
    options = parser.parse_args()
    for mutation in MUTATIONS:
        mutation.applied((ROOT / mutation.file).read_text())
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.what]
    least = len(chosen) if options.only else LEAST[options.tier]
    prepare(options.tier)
    for tier in () if options.only else ("first", "second") if options.tier == "second" else ("first",):
        if (name := first_failure("scripts/test.sh", "build", tier)) is not None:
            sys.exit(f"a test fails before anything is changed: {name}")
    count = 0
    for mutation in chosen:
        start = time.monotonic()
        name = outcome(mutation, options.tier)
        count += name is not None
        result = "NOT NOTICED" if name is None else f"noticed by {name}"
        print(f"{mutation.what}: {result} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{count} of {len(chosen)} mutations were noticed; at least {least} are expected")
    return 1 if count < least or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
