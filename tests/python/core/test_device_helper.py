"""One helper in each language says what is on CUDA, and what is on any device but the CPU.

A library that asks ``is_cuda()`` where it means "not on the CPU" takes every other accelerator for the CPU.
Such a question is therefore asked in ``csrc/core/device.h`` and ``shoestring.core.device`` only. A line
elsewhere that names CUDA is in ALLOWED, with the reason why it means CUDA and no other device.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoestring  # noqa: F401  registers the operators
from build_folder import REPOSITORY
from shoestring.core import device as helper

CPP_HELPER = ("csrc/core/device.h", "csrc/core/device.cpp")
PYTHON_HELPER = "python/shoestring/core/device.py"
NAMES_CUDA = re.compile(
    r"\bis_cuda\b|\bkCUDA\b|\bget\w*CUDAHooks\b|\bhasCUDA\b|\b\w*::\w*CUDA\b|\b\w+CUDA, m\)|"
    r"\b(?:c10|ATen)/cuda/|\b(?:c10|at)::cuda::|\"cuda\b|\b\w*PrivateUse1\b"
)
# The form in which the host functions of CUDA kernels are registered.
REGISTRATION = re.compile(r"TORCH_LIBRARY_IMPL\(shoestring, CUDA, m\)")
ALLOWED = {
    (
        "csrc/gemm/gemm.cpp",
        "is_cuda(out)",
    ): "cuBLAS alone has products whose result is wider than the factors",
    (
        "csrc/distributed/process_group.cpp",
        "on_gpus ? c10::DeviceType::CUDA",
    ): "NCCL communicates between CUDA devices alone",
    ("csrc/optim/optimizer.h", "DispatchKey::CUDA"): "registers the host function of CUDA kernels",
    ("csrc/optim/optimizer.h", "DispatchKey::SparseCUDA"): "registers an error for sparse gradients on CUDA",
    ("python/shoestring/_load.py", "torch.version.cuda"): "the version of CUDA for which PyTorch was built",
    ("python/shoestring/__main__.py", "torch.cuda"): "reports on the build of the CUDA kernels",
    ("python/shoestring/adapters/experts.py", "'is_cuda'"): "a name among the attributes of a tensor",
    (
        "python/shoestring/planning/measure.py",
        "is_cuda(device)",
    ): "TF32 is a format of NVIDIA's tensor cores",
    ("python/shoestring/planning/measure.py", "torch.cuda"): "TF32 depends on the compute capability",
    ("python/shoestring/runs/fast_defaults.py", "is_cuda(device)"): "switches of cuBLAS and cuDNN",
    ("python/shoestring/runs/fast_defaults.py", "torch.cuda"): "TF32 depends on the compute capability",
    ("python/shoestring/training/run/device.py", "torch.backends.cuda"): "switches of cuBLAS",
    (
        "python/shoestring/training/run/device.py",
        "is_cuda(device)",
    ): "TF32 is a format of NVIDIA's tensor cores",
    (
        "python/shoestring/training/run/precision.py",
        "is_cuda(device)",
    ): "GPUs without TF32 or bf16 are told by the compute capability",
    (
        "python/shoestring/training/run/precision.py",
        "torch.cuda",
    ): "TF32 and bf16 depend on the compute capability",
    ("python/shoestring/training/memory.py", "is_cuda(device)"): "asks NVML, the library of NVIDIA's driver",
    ("python/shoestring/training/memory.py", "torch.cuda"): "asks NVML, the library of NVIDIA's driver",
}

Found = tuple[str, int, str]


def without_comments(text: str) -> str:
    """Return C++ code with its comments blanked. The two slashes of an address in a string begin none."""
    return re.sub(r"(?<!:)//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)


def cpp_lines(root: Path) -> Iterator[Found]:
    """Yield file, line number and text of each line of C++ that names CUDA, except plain registrations."""
    for path in sorted(p for p in (root / "csrc").rglob("*") if p.suffix in (".h", ".cpp")):
        name = str(path.relative_to(root))
        if name in CPP_HELPER:
            continue
        code = REGISTRATION.sub("", without_comments(path.read_text()))
        for number, line in enumerate(code.splitlines(), 1):
            if NAMES_CUDA.search(line):
                yield name, number, line.strip()


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def python_lines(root: Path) -> Iterator[Found]:
    """Yield file, line number and text of each expression of Python that names CUDA."""
    for path in sorted((root / "python/shoestring").rglob("*.py")):
        name = str(path.relative_to(root))
        if name == PYTHON_HELPER:
            continue
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            called = dotted(node.func) if isinstance(node, ast.Call) else ""
            is_name = isinstance(node, ast.Attribute) and (
                node.attr == "is_cuda" or (node.attr == "cuda" and dotted(node).startswith("torch."))
            )
            is_text = isinstance(node, ast.Constant) and re.fullmatch(
                r"cuda(?::\w+)?|is_cuda|privateuseone", str(node.value)
            )
            if is_name or is_text or called.split(".")[-1] == "is_cuda":
                yield name, node.lineno, ast.unparse(node)


def refused(found: Iterator[Found], seen: set[tuple[str, str]]) -> list[Found]:
    """Return the lines that ALLOWED does not hold, and add the entries that were needed to ``seen``."""
    bad = []
    for file, number, text in found:
        entry = next((key for key in ALLOWED if key[0] == file and key[1] in text), None)
        bad.append((file, number, text)) if entry is None else seen.add(entry)
    return bad


def test_only_the_helper_names_cuda() -> None:
    seen: set[tuple[str, str]] = set()
    assert refused(cpp_lines(REPOSITORY), seen) + refused(python_lines(REPOSITORY), seen) == []
    assert seen == set(ALLOWED), "these entries of ALLOWED match no line"


@pytest.mark.parametrize(
    ("file", "line", "is_refused"),
    [
        ("csrc/a.cpp", "if (x.is_cuda()) copy();", True),
        ("csrc/a.cpp", "on.set_index(VirtualGuardImpl(c10::kCUDA).getDevice().index());", True),
        ("csrc/a.cpp", "at::detail::getCUDAHooks().deviceSynchronize(0);", True),
        ("csrc/a.cpp", "const bool gpu = at::globalContext().hasCUDA();", True),
        ("csrc/a.cpp", "TORCH_LIBRARY_IMPL(shoestring, AutocastCUDA, m) {}", True),
        ("csrc/a.cpp", "if (device.type() == c10::DeviceType::CUDA) f();", True),
        ("csrc/a.cpp", "#include <c10/cuda/CUDAStream.h>", True),
        ("csrc/a.cpp", 'const c10::Device device("cuda:0");', True),
        ("csrc/a.cpp", "if (x.device().type() == at::kPrivateUse1) f();", True),
        ("csrc/a.cpp", "if (!x.is_cpu()) f();  // not is_cuda()", False),
        ("csrc/a.cpp", 'TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl("f", f<Backend::kCuda>); }', False),
        ("python/shoestring/a.py", "stream = torch.cuda.current_stream()", True),
        ("python/shoestring/a.py", "if x.is_cuda: pass", True),
        ("python/shoestring/a.py", 'if x.device.type == "cuda": pass', True),
        ("python/shoestring/a.py", 'device = "cuda:0"', True),
        ("python/shoestring/a.py", "if is_cuda(x.device): pass", True),
        ("python/shoestring/a.py", 'if x.device.type != "cpu": pass  # torch.cuda', False),
    ],
)
def test_a_line_that_names_cuda_is_found(tmp_path: Path, file: str, line: str, is_refused: bool) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    assert bool(list(cpp_lines(tmp_path)) + list(python_lines(tmp_path))) == is_refused


def test_devices_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        "cpu": (False, False),
        "meta": (False, False),
        "cuda": (True, True),
        "privateuseone": (True, False),
    }
    for name, expected in kinds.items():
        device = torch.device(name)
        assert (helper.is_asynchronous(device), helper.is_cuda(device)) == expected
    helper.synchronize(torch.device("cpu"))
    found = torch.accelerator.current_accelerator(check_available=True)
    assert helper.default_device() == (found or torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    assert helper.default_device() == torch.device("xpu")


def test_each_autocast_rule_holds_for_every_device() -> None:
    """Autocast on an accelerator of another package casts as on CUDA."""
    rules = {
        key: {
            name
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith("shoestring::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        }
        for key in ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1")
    }
    assert rules["AutocastCPU"] == rules["AutocastCUDA"] == rules["AutocastPrivateUse1"]
    assert len(rules["AutocastCPU"]) >= 10


def test_a_forked_generator_is_restored() -> None:
    before = torch.get_rng_state()
    with helper.forked_rng():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
