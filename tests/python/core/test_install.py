"""pip builds the wheel from the source folder, and the installed package works outside of the repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from build_folder import BUILD, REPOSITORY
from shoestring import _load


@pytest.mark.skipif(not (BUILD / "CMakeCache.txt").exists(), reason="no build folder to make the wheel from")
def test_pip_installs_into_an_environment_that_has_pytorch(tmp_path: Path) -> None:
    environment = {**os.environ, "SHOESTRING_BUILD_DIR": str(BUILD)}
    environment.pop("PYTHONPATH", None)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    installed = tmp_path / "site"
    subprocess.run([*pip, "--target", str(installed), str(REPOSITORY)], check=True, env=environment)

    wheel = next(installed.glob("shoestring-*.dist-info/WHEEL")).read_text()
    # the tag "py3-none" says that the wheel does not depend on the version of Python
    assert "Tag: py3-none-linux_" in wheel
    package = installed / "shoestring"
    for part in (
        "lib/libshoestring.so",
        "include/shoestring/shoestring.h",
        "share/cmake/shoestring/LibTorch.cmake",
        "training/report/templates/base.html",
    ):
        assert (package / part).is_file(), part

    program = (
        "import torch, shoestring; print(shoestring.__file__); print(shoestring.linear_cross_entropy("
        + ("torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64)).item())")
    )
    environment["PYTHONPATH"] = str(installed)
    out = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    ).stdout.split()
    # The program prints a cross-entropy of log 4 = 1.386.
    assert Path(out[0]).parent == package and abs(float(out[1]) - 1.3862944) < 1e-6


def test_a_source_folder_that_is_not_built_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_load, "LIBRARIES", tmp_path)
    with pytest.raises(ImportError, match="not built; run `pip install --no-build-isolation .`"):
        _load.load()
