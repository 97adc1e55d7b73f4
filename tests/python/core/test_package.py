import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoestring
from shoestring import _load


def test_report_names_what_was_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoestring import __main__

    monkeypatch.setattr(sys, "argv", ["shoestring"])
    __main__.main()
    out = capsys.readouterr().out
    assert f"for PyTorch {shoestring.build.torch}" in out and "CPU" in out and "CUDA" in out


def test_cmake_dir_holds_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoestring import __main__

    monkeypatch.setattr(sys, "argv", ["shoestring", "--cmake-dir"])
    __main__.main()
    folder = Path(capsys.readouterr().out.strip())
    assert folder == Path(shoestring.cmake_prefix_path)
    assert (folder / "shoestring" / "shoestringConfig.cmake").is_file()


def test_another_pytorch_is_told_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = json.loads((_load.LIBRARIES / "build.json").read_text())
    (tmp_path / "build.json").write_text(json.dumps({**described, "torch": "2.3.1"}))
    monkeypatch.setattr(_load, "LIBRARIES", tmp_path)
    with pytest.raises(
        ImportError, match=r"built for PyTorch 2.3.1, and this is .*; rebuild it with `pip install"
    ):
        _load.load()


def test_capability_can_be_forced_and_a_wrong_name_is_refused() -> None:
    command = [
        sys.executable,
        "-c",
        "import shoestring, torch; print(torch.ops.shoestring._cpu_capability())",
    ]
    import os

    forced = subprocess.run(
        command, env={**os.environ, "SHOESTRING_CPU": "plain"}, capture_output=True, text=True
    )
    assert forced.stdout.strip() == "plain", forced.stderr
    with pytest.raises(RuntimeError, match="expected plain, avx2, avx512 or amx, received 'sse9'"):
        torch.ops.shoestring._set_cpu_capability("sse9")


def test_no_code_is_shared_between_capabilities() -> None:
    """AVX-512 object files contain no weak functions, except in the namespace avx512.

    The linker might keep the AVX-512 copy of a weak function for all callers. A call of this copy would crash
    on a machine without AVX-512.
    """
    objects = list(
        Path(_load.PACKAGE).parents[1].glob("build*/CMakeFiles/shoestring_avx512.dir/csrc/**/*_simd.cpp.o")
    )
    if not objects:
        pytest.skip("no build folder beside the package")
    symbols = subprocess.run(
        ["nm", "-C", *map(str, objects)], capture_output=True, text=True, check=True
    ).stdout
    shared = [line for line in symbols.splitlines() if re.match(r"\S+ W ", line) and "::avx512::" not in line]
    assert not shared


def test_the_library_runs_on_several_threads() -> None:
    """libshoestring.so is compiled with OpenMP.

    Without OpenMP, the loops of at::parallel_for silently run on one thread.
    """
    assert b"GOMP_parallel" in (_load.LIBRARIES / "libshoestring.so").read_bytes()
