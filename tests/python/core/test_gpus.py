"""The choice of CUDA kernels on each GPU, from T4 to RTX 5090, with the properties that the emulator reports."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpu_kernels
from build_folder import BUILD, EMULATOR, REPOSITORY

NEED_SM_80 = {path.name for path in (REPOSITORY / "cuda/attention").glob("*.cu")}
HOPPER = {path.name for path in (REPOSITORY / "cuda").glob("*/*_hopper.cu")}


@pytest.fixture(scope="module")
def logged() -> dict[str, Any]:
    """Return the launches of every case on every GPU. A process of its own loads the emulator."""
    if not EMULATOR.exists():
        pytest.skip("the emulator is not built: it needs g++")
    command = [sys.executable, Path(gpu_kernels.__file__), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_documented_tables_are_those_of_the_host_code(logged: dict[str, Any]) -> None:
    text = gpu_kernels.PAGE.read_text()
    documented = text[text.index(gpu_kernels.BEGIN) + len(gpu_kernels.BEGIN) : text.index(gpu_kernels.END)]
    assert documented == logged["tables"], "run `python tests/python/gpu_kernels.py --write`"


def test_every_gpu_is_built_for() -> None:
    """Each GPU has machine code in a wheel: of its own, or of an older GPU of the same generation."""
    built = re.search(r"^set\(_wheel (.+)\)$", (REPOSITORY / "cmake/Cuda.cmake").read_text(), re.MULTILINE)
    assert built is not None
    listed = re.findall(r"^\| [\w ]+ \| [\d.]+ \| sm_(\w+) \|", gpu_kernels.PAGE.read_text(), re.MULTILINE)
    assert len(listed) == 8 and set(listed) | {"ptx"} == set(built[1].split())


def test_no_block_has_more_shared_memory_than_the_gpu(logged: dict[str, Any]) -> None:
    for gpu in logged["gpus"]:
        for name, launches in logged["found"][gpu["name"]].items():
            for launch in launches if isinstance(launches, list) else ():
                used = launch["static_bytes"] + launch["dynamic_bytes"]
                assert used <= gpu["shared_bytes"], (gpu["name"], name, launch)
                assert 1 <= launch["threads"] <= 1024


def test_kernels_for_hopper_run_there_alone(logged: dict[str, Any]) -> None:
    for gpu in logged["gpus"]:
        used = {
            launch["file"]
            for launches in logged["found"][gpu["name"]].values()
            if isinstance(launches, list)
            for launch in launches
        }
        assert used & HOPPER == (HOPPER if gpu["capability"] == 90 else set()), gpu["name"]


def test_what_a_gpu_lacks_is_refused_in_words(logged: dict[str, Any]) -> None:
    """Only attention on T4 is refused, before any kernel that is empty there is launched."""
    for gpu in logged["gpus"]:
        for name, launches in logged["found"][gpu["name"]].items():
            if gpu["capability"] < 80 and "attention" in name:
                assert isinstance(launches, str)
                assert "attention: " in launches and "use PyTorch's scaled_dot_product_attention" in launches
                assert "expected a GPU of compute capability 8.0 or more" in launches
            else:
                assert isinstance(launches, list) and launches, (gpu["name"], name, launches)
                assert gpu["capability"] >= 80 or not {x["file"] for x in launches} & NEED_SM_80


def test_grouped_linear_multiplies_in_fp32_without_tensor_cores(logged: dict[str, Any]) -> None:
    """Its kernels of 16 bits are empty on T4."""
    for gpu in logged["gpus"]:
        launches = logged["found"][gpu["name"]]["`grouped_linear`"]
        products = {x["kernel"] for x in launches if x["kernel"].startswith("multiply<")}
        short = {kernel for kernel in products if not kernel.startswith("multiply<float,")}
        assert products and bool(short) == (gpu["capability"] >= 80), (gpu["name"], products)


def test_every_kernel_file_is_in_the_tables(logged: dict[str, Any]) -> None:
    launched = {
        launch["file"]
        for cases in logged["found"].values()
        for launches in cases.values()
        if isinstance(launches, list)
        for launch in launches
    }
    assert launched == {path.name for path in (REPOSITORY / "cuda").glob("*/*.cu")}


def test_the_emulator_counts_static_shared_memory_as_ptxas_does(logged: dict[str, Any]) -> None:
    """The emulator adds the sizes of variables. ptxas also aligns them, and leaves out those that are not used."""
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    import check_ptxas

    logs = list(BUILD.glob("CMakeFiles/*/cuda/*/*.cu.o.ptxas"))
    if not logs:
        pytest.skip("the CUDA kernels were not built")
    counted = {
        (launch["file"], launch["kernel"]): launch["static_bytes"]
        for cases in logged["found"].values()
        for launches in cases.values()
        if isinstance(launches, list)
        for launch in launches
    }
    compared = equal = 0
    for log in logs:
        usages = list(check_ptxas.usages(log.read_text()))
        names = check_ptxas.demangle([usage.symbol for usage in usages])
        for usage in usages:
            # Types have different names in the two demanglers, so kernels are found by their spelling alone.
            spelled = re.sub(r"\W|bool|int|Group|shoestring|kernels", "", names[usage.symbol])
            for (file, kernel), static in counted.items():
                if file != log.name.removesuffix(".o.ptxas"):
                    continue
                if re.sub(r"\W|bool|int|Group|shoestring|kernels", "", kernel) == spelled:
                    assert usage.shared <= static + 32, (file, kernel, usage)
                    compared += 1
                    equal += usage.shared == static > 0
    assert compared > 100 and equal > 30, (compared, equal)
