"""Test check_ptxas.py with kernels that break each of its rules on purpose."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/check_ptxas.py"
sys.path.insert(0, str(SCRIPT.parent))
import check_ptxas as gate  # noqa: E402

NVCC = shutil.which("nvcc") or (path if os.access(path := "/usr/local/cuda/bin/nvcc", os.X_OK) else None)

HEADER = """
// Budget: 40 registers, 64 bytes shared, no spills.
__global__ void much_shared(float* x) {
  __shared__ float y[32];
  y[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = y[31 - threadIdx.x];
}
"""
KERNELS = """
#include "in_a_header.h"

namespace shoestring::cuda { namespace {
// Budget: 40 registers, 0 bytes shared, no spills.
template <class T, int N>
__global__ void __launch_bounds__(128) good(T* x) { x[threadIdx.x] *= N; }

// Budget: 2 registers, 0 bytes shared, no spills.
__global__ void many_registers(float* x) { x[threadIdx.x] = x[threadIdx.x + blockIdx.x * 7] * x[blockIdx.y]; }

// Budget: 255 registers, 0 bytes shared, 4096 bytes stack, no spills.
__global__ void __launch_bounds__(1024, 2) spilling(float* x) {
  float y[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) y[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = y[63 - i] + y[(i * 5) % 64];
}

// Budget: 255 registers, 0 bytes shared, no spills.
__global__ void local_array(float* x, int n) {
  float y[16];
  for (int i = 0; i < n; ++i) y[i % 16] = x[i];
  x[n] = y[n / 3 % 16];
}

__global__ void no_budget(float* x) { x[0] = 1; }

// Budget: few registers.
__global__ void unreadable_budget(float* x) { x[0] = 1; }

// Budget: 40 registers, 0 bytes shared.
template <class T>
__global__ void never_compiled(T* x) { x[0] = 1; }

// Budget: 40 registers, 0 bytes shared.
void no_kernel(float* x) { x[0] = 1; }

auto* const kFirst = &good<float, 3>;
} }
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the CUDA source KERNELS for sm_80 with the compiler options of shoestring's build."""
    if NVCC is None:
        pytest.skip("no nvcc was found")
    folder = tmp_path_factory.mktemp("gate")
    (folder / "CMakeFiles/kernels.dir/cuda/room").mkdir(parents=True)
    source, target = folder / "bad.cu", folder / "CMakeFiles/kernels.dir/cuda/room/bad.cu.o"
    source.write_text(KERNELS)
    (folder / "in_a_header.h").write_text(HEADER)
    command = [
        ROOT / "cmake/keep_ptxas.sh",
        NVCC,
        "-std=c++17",
        "-Xptxas",
        "-v",
        "-c",
        source,
        "-o",
        target,
        "-gencode",
        "arch=compute_80,code=sm_80",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "ptxas info" not in done.stderr
    build = {"cuda": "13.0", "cuda_note": "", "gpus": ["75", "80", "120", "ptx"]}
    (folder / "build.json").write_text(json.dumps(build))
    return folder


def run(build: Path, sources: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, build, "--sources", sources, *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_rule_has_a_kernel_that_breaks_it(built: Path) -> None:
    done = run(built, built, "--table")
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("not ok ")]
    expected = (
        "bad.cu: many_registers, sm_80: ",
        "bad.cu: much_shared, sm_80: 128 bytes of shared memory, and its budget is 64",
        "bad.cu: spilling, sm_80: ",
        "bad.cu: local_array, sm_80: 64 bytes of stack frame, and its budget is 0",
        ": no_budget: expected a comment like ",
        ": unreadable_budget: expected a comment like ",
        "bad.cu: never_compiled: has a budget, and no such kernel was compiled for sm_80",
        "a budget that stands directly above no kernel",
        "bad.cu: not compiled for sm_75, ",
        "bad.cu: not compiled for sm_120, ",
    )
    for text in expected:
        assert sum(text in line for line in lines) == 1, (text, lines)
    assert len(lines) == len(expected), lines
    assert "bytes of spills, and its budget says no spills" in next(
        line for line in lines if "spilling" in line
    )
    assert done.stdout.splitlines()[-1] == f"1 passed, {len(expected)} failed"
    assert any(
        "good<float, 3>" in line and "budget: 40 registers" in line for line in done.stdout.splitlines()
    )


def test_kernels_for_hopper_alone(tmp_path: Path) -> None:
    source = tmp_path / "some_hopper.cu"
    source.write_text(
        "// Budget: 168 registers, 0 bytes shared, no spills.\n__global__ void fast(float* x) {}\n"
    )
    symbol = "_Z4fastPf"
    log = f"ptxas info    : Compiling entry function '{symbol}' for 'sm_90a'\nptxas info    : Used 168 registers\n"
    assert gate.check(source, log, ["sm_80"])[0] == []
    said = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to wgmma "
        f"pipeline crossing function boundary at a function call in the function '{symbol}'\n"
    )
    failures, _ = gate.check(source, said + log, ["sm_80"])
    assert failures == [
        "some_hopper.cu: fast: ptxas serialised its wgmma, due to wgmma pipeline crossing function "
        "boundary at a function call"
    ]


def test_compiler_errors_pass_through(tmp_path: Path) -> None:
    says = "echo 'ptxas info : Used 3 registers' >&2; echo wrong >&2; exit 3"
    command = [ROOT / "cmake/keep_ptxas.sh", "sh", "-c", says, "-o", tmp_path / "x.o"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "wrong\n")
    assert (tmp_path / "x.o.ptxas").read_text() == "ptxas info : Used 3 registers\n"


def test_a_build_without_cuda_is_skipped_visibly(tmp_path: Path) -> None:
    (tmp_path / "build.json").write_text(json.dumps({"cuda": None, "cuda_note": "no nvcc was found"}))
    done = run(tmp_path, tmp_path)
    assert done.returncode == 0
    assert (
        done.stdout
        == "skipped: the CUDA kernels were not built: no nvcc was found\n0 passed, 0 failed, 1 skipped\n"
    )


def test_a_file_that_was_not_built_fails(tmp_path: Path) -> None:
    (tmp_path / "build.json").write_text(json.dumps({"cuda": "13.0", "cuda_note": "", "gpus": ["80"]}))
    (tmp_path / "new.cu").write_text("// Budget: 1 registers, 0 bytes shared.\n__global__ void f() {}\n")
    done = run(tmp_path, tmp_path)
    assert done.returncode == 1
    assert "new.cu: " in done.stdout and "run make build" in done.stdout


def test_spills_of_called_functions_count() -> None:
    log = """ptxas info    : Compiling entry function '_Z1fv' for 'sm_80'
ptxas info    : Function properties for _Z1fv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 24 bytes cumulative stack size, 64 bytes smem, 488 bytes cmem[0]
ptxas info    : Function properties for _Z1gv
    24 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
"""
    assert list(gate.usages(log)) == [gate.Usage("_Z1fv", "sm_80", 32, 64, 24, 20)]


def test_fp32_instantiations_may_have_a_stack_of_their_own() -> None:
    line = "// Budget: 255 registers, 0 bytes shared, no spills; in fp32 80 bytes stack."
    (kernel,), wrong = gate.budgets(
        f"\n{line}\ntemplate <class T, int D>\n__global__ void forward(T* x) {{}}\n"
    )
    assert wrong == [] and kernel.budget is not None and line.endswith(f"{kernel.budget}.")
    for name, stack, spills in [
        ("forward<float, 64>", 80, True),
        ("forward<float>", 80, True),
        ("forward<__nv_bfloat16, 64>", 0, False),
        ("forward<double, float>", 0, False),
    ]:
        budget = kernel.budget.of(name)
        assert (budget.stack, budget.spills, budget.registers) == (stack, spills, 255)
