"""The order of instructions in the machine code of attention's forward on Hopper.

ptxas orders instructions as it likes where no data depends on them. The suite ``gates`` checks what must not be
in machine code; this test checks what makes the kernel fast.
"""

import sys

import pytest

from build_folder import BUILD, REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
import sass

OBJECT = BUILD / "CMakeFiles/shoestring_hopper_kernels.dir/cuda/attention/attention_hopper.cu.o"
# Exponentials of a tile in one lane: half of the tile's keys, and one for each of the two rows that shrink.
EXPONENTIALS = {64: 66, 96: 66, 128: 66, 192: 34, 256: 34}


@pytest.fixture(scope="module")
def code() -> dict[str, list[sass.Instruction]]:
    """Return the instructions of each kernel by its mangled name."""
    program = sass.disassembler()
    if program is None or not OBJECT.exists():
        pytest.skip("the CUDA kernels were not built, or there is no cuobjdump")
    kernels = sass.functions(sass.disassemble(program, OBJECT, "sm_90a"))
    assert kernels
    return kernels


@pytest.mark.parametrize("features", EXPONENTIALS)
@pytest.mark.parametrize("dtype", ["__nv_bfloat16", "__half"])
def test_exponentials_overlap_the_product_with_v(
    code: dict[str, list[sass.Instruction]], dtype: str, features: int
) -> None:
    """In the loop, a warpgroup waits for V's product after the exponentials, and then releases V at once."""
    (kernel,) = (x for name, x in code.items() if f"{len(dtype)}{dtype}Li{features}E" in name)
    waits = {
        operands: [i for i, x in enumerate(kernel) if "DEPBAR" in x.opcode and x.operands == operands]
        for operands in ("gsb0, 0x0", "gsb0, 0x1")
    }
    (begin,) = waits["gsb0, 0x1"]  # the wait for the scores alone, which only the loop has
    end = next(i for i in waits["gsb0, 0x0"] if i > begin)
    # A softcap, which is behind a branch, takes one exponential for each score.
    found = sum(x.opcode == "MUFU.EX2" for x in kernel[begin:end]) - (EXPONENTIALS[features] - 2)
    assert found == EXPONENTIALS[features]
    release = next(i for i in range(end, len(kernel)) if kernel[i].opcode.startswith("SYNCS.ARRIVE"))
    assert sum(x.opcode.startswith("FMUL") for x in kernel[end:release]) <= 16
