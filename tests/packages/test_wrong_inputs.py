"""Wrong inputs at each door give one line that says what to do, a failure, and no traceback."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from environments import SITE, container, environment, repack

from build_folder import BUILD, REPOSITORY
from shoestring import _load

# Folders into which a Debian package or pip puts cmake and ninja. The containers otherwise lack them.
CMAKE = [Path("/usr/bin/cmake"), *Path("/usr/share").glob("cmake-*"), Path("/usr/bin/c++")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files that a build needs, in which pip may write."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("csrc", "cuda", "cmake", "python", "scripts"):
        unneeded = shutil.ignore_patterns("lib", "include/torch", "share", "__pycache__", "*.egg-info")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=unneeded)
    for name in ("CMakeLists.txt", "setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


def one_line(output: str, expected: str) -> None:
    """Check that the lines that begin with shoestring's name are a single one, the expected message."""
    assert "Traceback" not in output, output
    # pip indents what a build prints.
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip().startswith(("shoestring: ", "shoestring was "))
    ]
    assert len(lines) == 1 and re.search(expected, lines[0]), output


def pip_install(python: Path, sources: Path, *arguments: object, **variables: str) -> str:
    """Run pip, which must fail; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CUDACXX")}
    command = [python, "-m", "pip", "install", "--no-index", *arguments, sources]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | variables, cwd=sources)
    assert done.returncode == 1, done.stdout
    return done.stdout + done.stderr


def pip_in_container(work: Path, sources: Path, read: list[Path]) -> str:
    python = environment(work / "env", ["pip", "setuptools", "torch"])
    command = [str(python), "-m", "pip", "install", "--no-deps", "--no-build-isolation", str(sources)]
    line = container(python, [path for path in read if path.exists()], command, work / "env", sources)
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    return done.stdout + done.stderr


def test_pip_without_a_compiler(sources: Path, tmp_path: Path) -> None:
    cmake = [*CMAKE[:-1], Path("/usr/bin/make")]
    if (SITE / "cmake").exists() or not CMAKE[0].exists():
        pytest.skip("cmake is not a package of the system")
    output = pip_in_container(tmp_path, sources, cmake)
    one_line(output, r"no C\+\+ compiler was found; install g\+\+ 12 or newer, or set CXX")


def test_pip_without_cmake(sources: Path, tmp_path: Path) -> None:
    output = pip_in_container(tmp_path, sources, [])
    one_line(output, "cmake was not found; install it, for example with `pip install cmake`")


def test_pip_without_pytorch(sources: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", ["pip", "setuptools"])
    output = pip_install(python, sources, "--no-deps", "--no-build-isolation")
    one_line(output, "PyTorch was not found, .*; run `pip install torch` first")


def test_pip_whose_build_isolation_hides_pytorch(sources: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", ["pip", "torch"])
    links = tmp_path / "links"
    links.mkdir()
    for name in ("setuptools", "ninja"):
        repack(name, links)
    output = pip_install(python, sources, "--no-deps", "--find-links", links)
    one_line(output, r"build isolation hides PyTorch \d+\.\S+ of this environment; .* --no-build-isolation")


def test_pip_with_an_old_setuptools(sources: Path, tmp_path: Path) -> None:
    """pip does not install the required setuptools with --no-build-isolation."""
    python = environment(tmp_path / "env", ["pip", "torch", "setuptools"])
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "setuptools").unlink()
    shutil.copytree(SITE / "setuptools", site / "setuptools")
    (site / "setuptools/version.py").write_text("__version__ = '65.5.0'\n")
    output = pip_install(python, sources, "--no-deps", "--no-build-isolation")
    one_line(output, "building needs setuptools 77 or newer, and this is 65.5.0; run `pip install ")


def test_pip_with_cuda_and_no_nvcc(sources: Path, tmp_path: Path) -> None:
    output = pip_install(
        Path(sys.executable),
        sources,
        "--no-deps",
        "--no-build-isolation",
        f"--target={tmp_path}/site",
        SHOESTRING_CUDA="1",
        SHOESTRING_BUILD_DIR=str(tmp_path / "build"),
        PATH="/usr/bin:/bin",
        CUDA_PATH="",
        CUDA_HOME="",
    )
    one_line(
        output, r"SHOESTRING_CUDA=1, but (no nvcc was found|this LibTorch has no CUDA): put nvcc into PATH"
    )


def test_cmake_without_libtorch(tmp_path: Path) -> None:
    command = ["cmake", "-S", REPOSITORY, "-B", tmp_path, f"-DTorch_ROOT={tmp_path}/none"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    errors = re.findall(r"^CMake Error", done.stderr, re.MULTILINE)
    text = " ".join(done.stderr.split())
    assert (
        len(errors) == 1 and "LibTorch was not found: set Torch_ROOT to a folder that holds include" in text
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc was found")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("wheel", "75;80;86;89;90a;100;120;ptx"),
        ("89-real;80-virtual", "89;ptx"),
        ("sm_80", "expected wheel, gates, or a list of numbers and ptx such as 80;90a;ptx, received 'sm_80'"),
    ],
)
def test_cmake_selects_gpus(value: str, expected: str, tmp_path: Path) -> None:
    command = [
        "cmake",
        "-S",
        REPOSITORY,
        "-B",
        tmp_path,
        f"-DPython3_EXECUTABLE={sys.executable}",
        "-DSHOESTRING_CUDA=1",
        f"-DSHOESTRING_CUDA_ARCHITECTURES={value}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert expected in " ".join((done.stdout + done.stderr).split())
    if value != "sm_80":
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "build.json").read_text())["gpus"] == expected.split(";")


def test_make_wheel_without_set_up(tmp_path: Path) -> None:
    python = environment(tmp_path / "env", ["pip"])
    script = REPOSITORY / "scripts/make_wheel.py"
    done = subprocess.run([python, script, BUILD], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "was not found; run `make setup`" in done.stderr
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"make_wheel.py: {tmp_path} is not a build folder; run `make build` first\n"


def installation(folder: Path, **build: str) -> dict[str, str]:
    """Make a copy of the package whose build.json differs; return an environment that imports it."""
    package = folder / "shoestring"
    (package / "lib").mkdir(parents=True)
    for path in _load.PACKAGE.iterdir():
        if path.name not in ("lib", "__pycache__"):
            (package / path.name).symlink_to(path)
    for library in _load.LIBRARIES.glob("*.so"):
        (package / "lib" / library.name).symlink_to(library)
    described = json.loads((_load.LIBRARIES / "build.json").read_text())
    (package / "lib/build.json").write_text(json.dumps(described | build))
    return os.environ | {"PYTHONPATH": f"{folder}:{REPOSITORY / 'python'}"}


def test_the_command_with_another_pytorch(tmp_path: Path) -> None:
    environment = installation(tmp_path, torch="2.99.0")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    script = "import shoestring_command, sys; sys.exit(shoestring_command.main())"
    for command in (
        ["-m", "shoestring"],
        ["-c", script, "estimate", "--model", str(tmp_path / "config.json")],
    ):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
        assert done.returncode in (1, 2), done.stdout  # 2 is the status of wrong options
        one_line(
            done.stderr,
            r"built for PyTorch 2\.99\.0, and this is .*, or run `pip install 'torch==2\.99\.\*'`",
        )
        assert done.stderr.count("\n") == 1, done.stderr


def test_a_program_with_another_cuda(tmp_path: Path) -> None:
    if torch.version.cuda is None:
        pytest.skip("this PyTorch has no CUDA")
    environment = installation(tmp_path, cuda="9.0")
    done = subprocess.run(
        [sys.executable, "-c", "import shoestring"], capture_output=True, text=True, env=environment
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert re.match(
        r"ImportError: shoestring was built for CUDA 9\.0, .* install the wheel for cu\d+ or the one", last
    )
