"""Test the rules for machine code in check_ptxas.py with short SASS texts that break each of them."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import check_ptxas as gate  # noqa: E402
import sass  # noqa: E402

START = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT"
MORE = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
FROM_REGISTERS = "HGMMA.64x64x16.F32 R24, R8, gdesc[UR8].tnspB, R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def kernel(*lines: str) -> list[sass.Instruction]:
    """Return the instructions of a kernel with the given lines at addresses 0x0000, 0x0010 and so on.

    The text is what cuobjdump prints, with the encoding in a comment after each instruction.
    """
    text = '\n\t\tFunction : _Z4fastPf\n\t.headerflags\t@"EF_CUDA_SM90"\n' + "".join(
        f"        /*{n * 16:04x}*/    {line} ;    /* 0x000fe20000000a00 */\n    /* 0x000fe40000000f00 */\n"
        for n, line in enumerate(lines)
    )
    (code,) = sass.functions(text).values()
    assert len(code) == len(lines)
    return code


def test_instructions_are_read() -> None:
    (first, second) = kernel("@!P0 BRA 0x10", "WARPSYNC.ALL")
    assert (first.address, first.predicate, first.opcode, first.operands) == (0, "!P0", "BRA", "0x10")
    assert (second.address, second.predicate, second.opcode, second.operands) == (
        16,
        None,
        "WARPSYNC.ALL",
        "",
    )


@pytest.mark.parametrize(
    "line",
    [
        "FADD R3, R55, 1",  # reads the last accumulator
        "MOV R24, RZ",  # writes the first one
        "LDS.128 R21, [R2]",  # writes four registers, of which the last is an accumulator
        "IMAD.WIDE R54, R2, R3, R4",
        "HGMMA.64x64x16.F32.BF16 R32, gdesc[UR8], R32, gsb0",  # a product that adds to a part of them
        "HGMMA.64x64x16.F32.BF16 R64, R24, gdesc[UR8], R64, gsb0",  # a product that reads them
    ],
)
def test_accumulators_are_not_touched_under_way(line: str) -> None:
    (found,) = sass.touched_in_flight(kernel(START, MORE, line, WAIT, "EXIT"))
    assert line in found and "R24 to R55" in found
    assert sass.touched_in_flight(kernel(START, MORE, WAIT, line, WAIT, "EXIT")) == []


def test_products_may_add_to_the_same_accumulators() -> None:
    assert sass.touched_in_flight(kernel(START, MORE, MORE, "FADD R56, R23, UR24", WAIT, "EXIT")) == []


def test_a_wait_for_all_but_one_group_finishes_the_older_ones() -> None:
    later = "HGMMA.64x64x16.F32.BF16 R64, gdesc[UR8], RZ, gsb0"
    code = (START, MORE, later, "WARPGROUP.DEPBAR.LE gsb0, 0x1")
    assert sass.touched_in_flight(kernel(*code, "MOV R24, RZ", "EXIT")) == []
    (found,) = sass.touched_in_flight(kernel(*code, "MOV R64, RZ", "EXIT"))
    assert "MOV R64, RZ" in found


def test_every_path_is_followed() -> None:
    # The second path jumps over the wait.
    code = (START, MORE, "@P0 BRA 0x40", WAIT, "MOV R24, RZ", "EXIT")
    (found,) = sass.touched_in_flight(kernel(*code))
    assert "0x0040" in found
    # A loop whose product is still under way when its next round begins.
    (found,) = sass.touched_in_flight(kernel("FADD R3, R24, 1", START, MORE, "@P0 BRA 0x0", WAIT, "EXIT"))
    assert "0x0000" in found


def test_registers_of_a_are_read_only_under_way() -> None:
    code = (FROM_REGISTERS, "FADD R3, R8, R11", "STS [R9], R10")
    assert sass.touched_in_flight(kernel(*code, WAIT, "MOV R8, RZ", "EXIT")) == []
    (found,) = sass.touched_in_flight(kernel(*code, "LDS.64 R10, [R2]", WAIT, "EXIT"))
    assert "writes R8 to R11" in found


def test_no_call_and_no_unknown_jump_under_way() -> None:
    (found,) = sass.touched_in_flight(
        kernel(START, MORE, "CALL.REL.NOINC 0x50", WAIT, "EXIT", "RET.REL.NODEC R2 0x0")
    )
    assert "a call" in found
    (found,) = sass.touched_in_flight(kernel("BRX R2 -0x10", START, MORE, WAIT, "EXIT"))
    assert "not known" in found


def test_registers_stay_below_setmaxnreg() -> None:
    code = ["MOV R90, RZ", "@P0 BRA 0x50", "USETMAXREG.DEALLOC.CTAPOOL 0x28", "FADD R39, R1, R2", "EXIT"]
    computing = ["USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8", "MOV R231, RZ", "EXIT"]
    assert sass.beyond_setmaxnreg(kernel(*code, *computing)) == []
    for line in ("FADD R1, R40, R2", "LDS.64 R39, [R2]", "LDG.E.128 R37, [R2.64]", "STG.E [R39.64], R1"):
        (found,) = sass.beyond_setmaxnreg(kernel(*code[:3], line, "EXIT", *computing))
        assert line in found and "40 registers" in found, line
    (found,) = sass.beyond_setmaxnreg(
        kernel(*code, *computing[:1], "HGMMA.64x64x16.F32 R208, gdesc[UR8], RZ", "EXIT")
    )
    assert "R239" in found
    # A function that the producer calls counts as its code.
    called = (*code[:3], "CALL.REL.NOINC 0x50", "EXIT", "MOV R77, RZ", "RET.REL.NODEC R2 0x0")
    (found,) = sass.beyond_setmaxnreg(kernel(*called))
    assert "R77" in found


def test_local_memory_is_found() -> None:
    assert sass.local_memory(kernel("LDS R1, [R2]", "LDG.E R1, [R2.64]", "STG.E [R2.64], R1")) == []
    assert len(sass.local_memory(kernel("LDL R1, [R1+0x8]", "STL.64 [R1], R2"))) == 2


def test_products_are_listed_by_shape_type_and_order() -> None:
    code = kernel(START, MORE, FROM_REGISTERS, "HGMMA.64x256x16.F32 R24, gdesc[UR8].tnspA.tnspB, R24, gsb0")
    assert sass.products(code) == [
        "m64n256k16 fp16, a in shared memory, a transposed, b transposed",
        "m64n64k16 bf16, a in shared memory",
        "m64n64k16 fp16, a in registers, b transposed",
    ]


def test_the_list_of_products_is_compared() -> None:
    code = {"fast<64>": kernel(START, MORE, WAIT, "EXIT")}
    listed = {"fast<64>": ["m64n64k16 bf16, a in shared memory"]}
    assert gate.check_products("f.cu", code, listed) == []
    wrong = {"fast<64>": ["m64n64k16 bf16, a in shared memory, b transposed"]}
    for other in (wrong, {}, listed | {"fast<128>": ["m64n128k16 bf16, a in shared memory"]}):
        (error,) = gate.check_products("f.cu", code, other)
        assert "expected the products" in error and "--write" in error
    # A table that compares nothing fails as well.
    assert gate.check_products("f.cu", {}, listed) != []
    broken = {"fast<64>": kernel(START, MORE, "STL [R1], R2", "MOV R24, RZ", WAIT, "EXIT")}
    assert len(gate.check_products("f.cu", broken, listed)) == 2


def test_fused_products_are_found() -> None:
    fused = {"f": kernel("FFMA R1, R2, R3, R4", "FMUL R1, R2, R3", "EXIT")}
    apart = {"f": kernel("FMUL R1, R2, R3", "FADD R1, R1, R4", "FMUL R1, R2, R3", "EXIT")}
    assert gate.check_exact("f.cu", apart, apart, {}) == []
    (error,) = gate.check_exact("f.cu", fused, apart, {})
    assert "1 FFMA, and 0 with -fmad=false" in error and "__fmul_rn" in error
    assert gate.check_exact("f.cu", fused, apart, {"FFMA": 1, "reason": "exact"}) == []
    assert len(gate.check_exact("f.cu", fused, apart, {"FFMA": 1})) == 1  # without a reason
    assert len(gate.check_exact("f.cu", fused, apart, {"DFMA": 1, "reason": "exact"})) == 1
    # A kernel with more additions and no FFMA has no fused products.
    added = {"f": kernel("FMUL R1, R2, R3", "FMUL R1, R2, R3", "FADD R1, R1, R4", "FADD R1, R1, R4", "EXIT")}
    assert len(gate.check_exact("f.cu", added, apart, {"FFMA": 1, "reason": "exact"})) == 1
    # Nothing to compare is an error.
    assert len(gate.check_exact("f.cu", {}, {}, {})) == 1
    assert len(gate.check_exact("f.cu", apart, {}, {})) == 1


def test_objects_that_were_not_built_fail(tmp_path: Path) -> None:
    if sass.disassembler() is None:
        pytest.skip("no cuobjdump was found")
    errors, passed = gate.check_machine_code(tmp_path, ROOT / "cuda", False)
    assert passed == 0 and len(errors) > 3
    assert all("run make build-tests" in error for error in errors)


def test_a_build_without_sm_80_is_skipped_visibly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cuda/layers").mkdir(parents=True)
    (tmp_path / "cuda/layers/seeded_dropout.cu").touch()
    objects = tmp_path / "build/CMakeFiles/kernels.dir/cuda/layers"
    objects.mkdir(parents=True)
    log = objects / "seeded_dropout.cu.o.ptxas"
    log.write_text("ptxas info    : Compiling entry function '_Z4dropv' for 'sm_90a'\n")
    assert gate.check_machine_code(tmp_path / "build", tmp_path / "cuda", False) == ([], 0)
    assert capsys.readouterr().out.startswith("skipped: seeded_dropout.cu: ")


def test_the_list_names_files_that_exist() -> None:
    lists = json.loads(gate.EXPECTED.read_text())
    assert all((ROOT / name).exists() for name in lists["exact"])
    assert lists["wgmma"].keys() == {f.name for f in (ROOT / "cuda").rglob("*_hopper.cu")}
