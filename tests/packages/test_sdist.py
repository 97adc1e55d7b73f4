"""The source distribution has every file that a build opens, and a wheel can be built from it.

``make nightly`` compiles everything from it. Daily, ninja finds nothing to do when the unpacked files take the place
of the repository: the files are all there, with the contents that the libraries were compiled from.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from build_folder import BUILD, REPOSITORY

pytestmark = pytest.mark.skipif(
    not (BUILD / "build.ninja").exists(), reason="no build folder that ninja made"
)
VERSION = re.search(r'VERSION "(.+)"', (REPOSITORY / "csrc/include/shoestring/core/version.h").read_text())[1]


def without_pythonpath() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, REPOSITORY]
    # Outside of the repository, whose folder build would hide the package build.
    subprocess.run(command, check=True, env=without_pythonpath(), cwd=out, stdout=subprocess.DEVNULL)
    return out / f"shoestring-{VERSION}.tar.gz"


@pytest.fixture(scope="module")
def files(archive: Path) -> set[str]:
    with tarfile.open(archive) as opened:
        return {name.partition("/")[2] for name in opened.getnames()}


@pytest.fixture
def unpacked(archive: Path, tmp_path: Path) -> Path:
    with tarfile.open(archive) as opened:
        # Newer versions of Python ask for a filter; versions before 3.11.4 have no argument for it.
        opened.extraction_filter = lambda member, path: member
        opened.extractall(tmp_path)
    return tmp_path / f"shoestring-{VERSION}"


def ninja(*arguments: str) -> list[str]:
    out = subprocess.run(
        ["ninja", "-C", BUILD, *arguments], check=True, capture_output=True, text=True
    ).stdout
    return out.splitlines()


def opened_by_the_build() -> set[str]:
    """Return the files of the repository that ninja's target "libraries" and CMake's configure step read."""
    inputs = [line.strip() for line in ninja("-t", "inputs", "libraries")]
    objects = [line for line in inputs if line.endswith((".o", ".gch"))]
    paths = inputs + [line.strip() for line in ninja("-t", "deps", *objects) if line.startswith("    ")]
    paths += [line.strip(" |") for line in ninja("-t", "query", "build.ninja")]
    found = set()
    for path in paths:
        full = Path(os.path.normpath(BUILD / path))
        if full.is_relative_to(REPOSITORY) and not full.is_relative_to(BUILD) and full.is_file():
            found.add(str(full.relative_to(REPOSITORY)))
    # The programs of the tests share the folder with the libraries, so CMake reads their descriptions as well.
    return {path for path in found if not path.startswith(("tests/", ".venv"))}


def test_it_has_every_file_that_the_build_opens(files: set[str]) -> None:
    opened = opened_by_the_build()
    assert {"CMakeLists.txt", "cmake/LibTorch.cmake", "csrc/include/shoestring/core/version.h"} <= opened
    assert len([path for path in opened if path.startswith("csrc/")]) > 200
    assert opened <= files, sorted(opened - files)


def test_it_has_every_source_that_git_tracks(files: set[str]) -> None:
    """A build without CUDA does not open the CUDA kernels, and CMake opens no Python source."""
    command = ["git", "ls-files", "csrc", "cuda", "cmake", "python", "LICENSE", "NOTICE", "README.md"]
    tracked = subprocess.run(
        command, cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.split()
    assert len(tracked) > 400
    assert set(tracked) <= files, sorted(set(tracked) - files)


def test_it_has_no_file_that_a_build_made(files: set[str]) -> None:
    made = [
        path for path in files if re.search(r"\.(so|o|a|pyc)$|^python/shoestring/(lib|include|share)/", path)
    ]
    assert not made


def test_its_metadata_leaves_pytorch_open(archive: Path) -> None:
    with tarfile.open(archive) as opened:
        metadata = opened.extractfile(f"shoestring-{VERSION}/PKG-INFO")
        assert metadata is not None
        text = metadata.read().decode()
    assert f"\nVersion: {VERSION}\n" in text and "\nRequires-Dist: torch>=2.11\n" in text
    # A wheel made from it may require less.
    assert "\nDynamic: requires-dist\n" in text.lower().replace("dynamic", "Dynamic")


def test_ninja_finds_nothing_to_compile_in_its_files(unpacked: Path, tmp_path: Path) -> None:
    """In a container whose repository is the unpacked archive, pip makes a wheel of the libraries of this build."""
    copy = tmp_path / "build"
    shutil.copytree(
        BUILD, copy, symlinks=True, ignore=shutil.ignore_patterns("tests", "_CPack_Packages", "packages")
    )
    prefix = Path(sys.prefix)
    line = [
        "bwrap",
        "--die-with-parent",
        "--dev-bind",
        "/",
        "/",
        "--bind",
        unpacked,
        REPOSITORY,
        "--bind",
        copy,
        BUILD,
    ]
    line += ["--bind", tmp_path, tmp_path]
    if prefix.is_relative_to(REPOSITORY):
        line += ["--ro-bind", prefix.resolve(), prefix]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        REPOSITORY,
    ]
    environment = without_pythonpath() | {
        "SHOESTRING_BUILD_DIR": str(BUILD),
        "CMAKE_ARGS": "-DSHOESTRING_TESTS=OFF",
    }
    done = subprocess.run([*line, "--chdir", tmp_path, *pip], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ninja: no work to do." in done.stdout + done.stderr, done.stdout + done.stderr
    assert len(list(tmp_path.glob("shoestring-*.whl"))) == 1


@pytest.mark.nightly
def test_a_wheel_compiled_from_it_works(archive: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    environment = without_pythonpath() | {"SHOESTRING_CUDA": "0"}
    subprocess.run([*pip, tmp_path / "site", archive], check=True, env=environment, cwd=tmp_path)
    program = "import shoestring; print(shoestring.__file__); print(shoestring.build.cuda_note)"
    environment["PYTHONPATH"] = str(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[:2] == [
        str(tmp_path / "site/shoestring/__init__.py"),
        "switched off with SHOESTRING_CUDA=0",
    ]
