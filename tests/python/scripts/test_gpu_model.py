"""Test the roofline of benchmarks/gpu_model.py with short SASS texts, and with the times that an H200 measured."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import sass  # noqa: E402

from benchmarks import gpu_kernels  # noqa: E402
from benchmarks import gpu_model as model  # noqa: E402
from benchmarks.gpu_kernels import STORED, VECTOR, Case, Kernel  # noqa: E402
from benchmarks.gpu_model import Code, Row  # noqa: E402

LIBRARY = Path(os.environ.get("SHOESTRING_BUILD", ROOT / "build")) / "libshoestring_cuda.so"
RESULTS = ROOT / "benchmarks/results/nvidia-h200.json"
H200 = model.DEVICES["H200"]


def program(*lines: str) -> list[sass.Instruction]:
    """Return the instructions of a kernel with the given lines at addresses 0x0000, 0x0010 and so on."""
    text = "Function : f\n" + "".join(f"/*{n * 16:04x}*/ {line} ;\n" for n, line in enumerate(lines))
    return sass.functions(text)["f"]


# Two loads and a store of 16 bytes per trip. The store has a slow path of 4 stores of 4 bytes.
LOOP = (
    "LDG.E.128 R4, [R2.64]",  # 0x00
    "LDG.E.128 R8, [R2.64]",
    "FFMA R4, R4, R8, R9",
    "@P1 BRA 0x70",
    "STG.E.128 [R2.64], R4",
    "@P0 BRA 0x0",
    "EXIT",  # 0x60
    "STG.E [R2.64], R4",
    "STG.E [R2.64], R5",
    "STG.E [R2.64], R6",
    "STG.E [R2.64], R7",
    "BRA 0x50",
)


def opcodes(code: list[sass.Instruction], want: dict[str, int]) -> Counter[str] | None:
    path = model.shortest_path(code, want)
    return None if path is None else Counter(code[n].opcode for n in path)


def test_the_path_has_what_is_required_and_no_more() -> None:
    assert model.shortest_path(program(*LOOP), {}) == [0, 1, 2, 3, 4, 5, 6]
    twice = opcodes(program(*LOOP), {r"LDG\b.*\.128": 4, STORED: 32})
    assert twice == Counter({"LDG.E.128": 4, "FFMA": 2, "BRA": 4, "STG.E.128": 2, "EXIT": 1})
    # Without the vector store, only the slow path stores.
    slow = opcodes(program(*(line.replace("STG.E.128 [R2.64], R4", "NOP") for line in LOOP)), {STORED: 16})
    assert slow is not None and slow["STG.E"] == 4
    assert opcodes(program(*LOOP), {"HMMA": 1}) is None


def test_a_call_that_does_not_return_is_a_jump() -> None:
    lines = ("@P0 CALL.REL.NOINC 0x30", "RET.REL.NODEC R2", "NOP", "MUFU.EX2 R0, R0", "EXIT")
    assert model.shortest_path(program(*lines), {r"MUFU\.EX2": 1}) == [0, 3, 4]


def test_a_trip_stays_in_one_loop() -> None:
    """The loop of two loads is shorter, but has no MUFU; a way through both loops is longer."""
    other = (
        "MUFU.EX2 R4, R4",
        *LOOP[:2],
        "IADD3 R4, R4, R5, R6",
        "IADD3 R4, R4, R5, R6",
        "@P0 BRA 0xc0",
        "EXIT",
    )
    lines = [*(line if line != "EXIT" else "@P2 EXIT" for line in LOOP[:-1]), "BRA 0x50", *other]
    lines[6] = "BRA 0xc0"
    code = program(*lines)
    assert model.shortest_loop(code, {r"LDG\b.*\.128": 2}) == [0, 1, 2, 3, 4, 5]
    assert model.shortest_loop(code, {r"LDG\b.*\.128": 2, "MUFU": 1}) == [12, 13, 14, 15, 16, 17]
    assert model.shortest_loop(code, {"HMMA": 1}) is None


def test_vectors_that_are_stored_in_parts_are_marked() -> None:
    kernel = Kernel("f", {STORED: 16}, 5, 32, 1, pieces=VECTOR)
    case = Case("b", "t", "r", 1e9, (kernel,))
    whole = model.read_kernel(program(*LOOP), kernel, 32, 0)
    parts = model.read_kernel(
        program(*(x.replace("STG.E.128 [R2.64], R4", "NOP") for x in LOOP)), kernel, 32, 0
    )
    assert whole is not None and parts is not None
    for code, marks in ((whole, ""), (parts, "vectors are stored in parts")):
        (row,) = model.rows(H200, [case], {model.key(kernel): code}, [])
        assert row.marks == marks
    # 4 stores of 4 bytes touch as many sectors each as one store of 16 bytes
    ratio = (
        model.kernel_clocks(H200, kernel, parts)["stores"]
        / model.kernel_clocks(H200, kernel, whole)["stores"]
    )
    assert ratio == pytest.approx(4)


def test_trips_are_extrapolated() -> None:
    code = model.read_kernel(program(*LOOP), Kernel("f", {STORED: 16}, 5, 32, 1), 32, 0)
    assert code is not None
    assert code.opcodes(5)["STG.E.128"] == 5 and code.opcodes(5)["EXIT"] == 1
    assert code.opcodes(2.5)["FFMA"] == 2.5


@pytest.mark.parametrize(
    ("opcode", "pipe", "lanes"),
    [
        ("FFMA.RM", "FMA", 32),
        ("ISETP.GE.AND", "ALU", 32),
        ("MUFU.EX2", "XU", 32),
        ("F2FP.BF16.F32.PACK_AB", "ALU", 32),
        ("DFMA", "FP64", 32),
        ("SHFL.BFLY", "LSU", 32),
        ("LDG.E.128", "LSU", 128),  # four passes of 128 bytes
        ("HMMA.16816.F32.BF16", "tensor", 2 * 16 * 8 * 16),
        ("HGMMA.64x128x16.F32.BF16", "tensor", 2 * 64 * 128 * 16 / 4),  # a warp's quarter
    ],
)
def test_instructions_go_to_their_pipes(opcode: str, pipe: str, lanes: float) -> None:
    assert dict(model.work(opcode, {})) == {"issue": 32, pipe: lanes}


def test_others_take_an_issue_slot_only() -> None:
    for opcode in ("BRA", "BAR.SYNC.DEFER_BLOCKING", "LDC", "ULDC.64", "UIADD3", "S2R", "NOP"):
        assert dict(model.work(opcode, {})) == {"issue": 32}, opcode


def test_split_stores_touch_the_sectors_of_whole_vectors() -> None:
    """Lanes are 16 bytes apart. A store of 2 or of 16 bytes touches 16 sectors of 32 bytes either way."""
    for opcode in ("STG.E.U16", "STG.E", "STG.E.128"):
        assert dict(model.work(opcode, VECTOR))["stores"] == 16
    assert dict(model.work("STG.E", {}))["stores"] == 4  # 128 contiguous bytes


@pytest.mark.parametrize(
    ("gpu", "registers", "shared", "threads", "blocks"),
    [
        ("H200", 32, 0, 256, 8),  # threads
        ("H200", 64, 0, 256, 4),  # registers
        ("H200", 62, 1664, 1024, 1),  # 62 registers are allocated as 64
        ("H200", 32, 100 << 10, 128, 2),  # shared memory
        ("T4", 32, 0, 32, 16),  # blocks
        ("T4", 32, 0, 256, 4),
        ("4090", 32, 0, 256, 6),
    ],
)
def test_occupancy(gpu: str, registers: int, shared: int, threads: int, blocks: int) -> None:
    code = Code(registers, shared, Counter(), Counter())
    assert model.resident(model.DEVICES[gpu], Kernel("f", {}, 1, threads, 1), code) == blocks


def test_the_slowest_resource_is_the_time() -> None:
    def kernel(block: bool = False, waits: int = 0) -> Kernel:
        return Kernel("f", {}, 1, 256, 132 * 64, block=block, waits=waits)

    arithmetic = Counter({"FFMA": 1000})
    code = Code(32, 0, arithmetic, arithmetic)
    case = Case("b", "t", "r", 4.8e12 * model.COPY * 1e-6, (kernel(),))
    seconds = model.predict(H200, case, [code])
    # 64 blocks of 8 warps on each SM, and 128 lanes of which ISSUED are busy
    expected = 64 * 8 * 1000 * 32 / (128 * model.ISSUED) / H200.clock
    assert seconds["FMA"] == seconds["issue"] == pytest.approx(expected)
    assert seconds["memory"] == pytest.approx(1e-6)
    row = Row(case, seconds, 2 * expected, {})
    assert row.bound in ("FMA", "issue") and row.predicted == pytest.approx(expected + model.START)
    assert row.marks.startswith("slower than predicted, ")
    # 8 blocks are resident, in 8 waves, each of which waits and then computes one block
    alone = model.kernel_clocks(H200, kernel(block=True, waits=500), code)["chain"]
    assert alone == pytest.approx(8 * (500 + 8 * 1000 * 32 / (128 * model.ISSUED)))


def test_the_clock_follows_from_the_published_rate() -> None:
    for name, ghz in {"T4": 1.59, "A100": 1.41, "4090": 2.52, "H100": 1.98, "H200": 1.98}.items():
        assert model.DEVICES[name].clock / 1e9 == pytest.approx(ghz, rel=0.006)
    assert model.device_of("NVIDIA GeForce RTX 4090") == "4090"
    assert model.device_of("NVIDIA A100-SXM4-80GB") == "A100"
    assert model.device_of("NVIDIA L40S") is None


def test_each_problem_is_named_once_and_each_measured_one_exists() -> None:
    cases = gpu_kernels.catalogue()
    names = [(c.table, c.row) for c in cases]
    assert len(set(names)) == len(names)
    measured = {(t["title"], r["name"]) for t in model.tables_of(RESULTS) for r in t["rows"]}
    found = {c.benchmark for c in cases if (c.table, c.row) in measured}
    assert found >= {"optim", "quantize", "cross_entropy", "linear_cross_entropy"}
    # Tables of these benchmarks that are not in the catalogue: Muon, many tensors.
    unknown = {
        t["title"]
        for b in json.loads(RESULTS.read_text())["benchmarks"]
        if b["benchmark"] in found
        for t in b["tables"]
    } - {c.table for c in cases}
    assert all(title.startswith(("Muon", "AdamW, 1000 tensors")) for title in unknown), unknown


def read(cases: list[Case], gpu: str = "H200") -> dict[str, Code]:
    if not LIBRARY.exists():
        pytest.skip("the CUDA kernels were not built")
    try:
        return model.read_library(LIBRARY, model.DEVICES[gpu], cases)
    except RuntimeError as reason:
        pytest.skip(str(reason))


def streaming(case: Case) -> bool:
    """Return whether a case is one of the kernels that memory limits: optimizer steps and dequantising."""
    return bool(case.kernels) and (
        case.benchmark == "optim" or (case.benchmark == "quantize" and case.table.startswith("dequantise"))
    )


def test_memory_bound_kernels_take_what_the_model_says() -> None:
    """The measured time lies between perfect overlap at the published rates, and no overlap at all.

    No kernel is faster than a copy of its bytes, of which the results vary by 5 %, nor issues instructions faster than
    the published rates. Without overlap, the time is that of the memory plus that of the next resource. Memory is
    slower if several arrays stream than if one is copied, by a factor that the benchmark of AdamW has measured, too.
    """
    cases = [c for c in gpu_kernels.catalogue() if streaming(c)]
    tables = model.tables_of(RESULTS)
    found = [row for row in model.rows(H200, cases, read(cases), tables) if row.measured is not None]
    assert len(found) == 8 + 4 * 4 + 12
    adamw = next(t for t in tables if t["title"] == "AdamW, one tensor of 1000 Mi, bfloat16")
    seconds = {row["name"]: row["seconds"] for row in adamw["rows"]}
    streams = seconds["limit: 8bit streams"] / seconds["limit: copy of the 8bit bytes"]
    assert 1 < streams < 1.15
    for row in found:
        assert row.measured is not None
        others = max(s for resource, s in row.seconds.items() if resource != "memory")
        most = streams * row.seconds["memory"] + others + row.case.launches * model.START
        what = (row.case.table, row.case.row, row.seconds, row.measured)
        assert max(0.95 * row.seconds["memory"], model.ISSUED * others) < row.measured < most, what


def test_the_model_says_what_limits_the_others() -> None:
    """int4 is fitted by arithmetic, and the losses of rows wait: neither is near the time of its bytes."""
    cases = [
        c
        for c in gpu_kernels.catalogue()
        if c.table in ("quantise int4, 56 Mi elements, float32", "AdamW, one tensor of 1000 Mi, float32")
    ]
    found = {
        row.case.table.split(",")[0]: row
        for row in model.rows(H200, cases, read(cases), model.tables_of(RESULTS))
    }
    assert found["quantise int4"].predicted > 2 * found["quantise int4"].least
    assert found["quantise int4"].bound == "issue" and "issue takes" in found["quantise int4"].marks
    assert found["AdamW"].bound == "memory" and found["AdamW"].marks == ""
    # Instructions per element: AdamW has at most about 60, and int4 has nine fitting steps of about 40.
    kernel, fit = found["AdamW"].case.kernels[0], found["quantise int4"].case.kernels[0]
    codes = read(cases)
    assert 25 < sum(codes[model.key(kernel)].opcodes(8).values()) / 64 < 60
    assert 300 < sum(codes[model.key(fit)].opcodes(9).values()) / 4 < 600


@pytest.mark.parametrize(("rule", "stated"), [("Adafactor", 33), ("CAME", 46)])
def test_calls_of_composed_optimizers(rule: str, stated: int) -> None:
    """The catalogue states how many operators a step calls. Views and allocations are not counted."""
    from torch.profiler import ProfilerActivity, profile

    import shoestring.optim

    assert {c.calls for c in gpu_kernels.catalogue() if c.table.startswith(rule)} == {stated}
    param = torch.nn.Parameter(torch.ones(64, 64))
    param.grad = torch.ones(64, 64)
    options = {"beta1": 0.9} if rule == "Adafactor" else {}
    optimizer = getattr(shoestring.optim, rule)([param], **options)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        optimizer.step()
    free = (
        "empty",
        "as_strided",
        "expand",
        "view",
        "select",
        "slice",
        "squeeze",
        "detach",
        "result_type",
        "resolve",
    )
    calls = [
        e.name for e in found.events() if not e.cpu_children and not any(name in e.name for name in free)
    ]
    assert len(calls) == pytest.approx(stated, rel=0.2), Counter(calls)


def test_a_gpu_without_figures_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/gpu_model.py", "--gpu", "NVIDIA L40S", "--library", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode == 2
        and "expected one of T4, A100, 4090, H100, H200, received NVIDIA L40S" in done.stderr
    )


def test_without_a_disassembler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "disassembler", lambda: None)
    library = tmp_path / "libshoestring_cuda.so"
    library.touch()
    with pytest.raises(RuntimeError, match="no cuobjdump was found"):
        model.read_library(library, H200, gpu_kernels.catalogue())


def test_what_was_read_is_kept_for_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libshoestring_cuda.so"
    library.touch()
    cases = [Case("b", "t", "r", 1, (Kernel("f", {STORED: 16}, 2, 32, 1),))]
    calls = []

    def fake(library: Path, device: model.Device, wanted: dict[str, Kernel]) -> dict[str, list | None]:
        calls.append(list(wanted))
        return {name: [32, 0, {"EXIT": 1}, {"EXIT": 1}] for name in wanted}

    monkeypatch.setattr(model, "_read", fake)
    first = model.read_library(library, H200, cases)
    assert model.read_library(library, H200, cases) == first and len(calls) == 1
    library.write_text("another build")
    model.read_library(library, H200, cases)
    assert len(calls) == 2
