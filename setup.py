"""Build the native libraries with CMake; only the CMake files describe that build.

CMake installs libraries, headers and the CMake package into the folder of the Python package. A wheel, an
editable install and an install prefix therefore have the same files. ``scripts/backend/build_backend.py`` calls this
script for pip, after it has checked that pip builds against the right PyTorch.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

# With --no-build-isolation, pip does not install the setuptools version that pyproject.toml requires. The
# venv module of Python 3.11 installs an older one.
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"shoestring: building needs setuptools 77 or newer, and this is {setuptools.__version__}; "
        "run `pip install 'setuptools>=77,<82' ninja` first"
    )

from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent.resolve()
BUILD = Path(os.environ.get("SHOESTRING_BUILD_DIR", ROOT / "build"))
VERSION = re.search(r'VERSION "(.+)"', (ROOT / "csrc/include/shoestring/core/version.h").read_text())[1]
# The commands that make something of a build. The others (sdist, egg_info) need neither CMake nor PyTorch.
COMMANDS = {"dist_info", "bdist_wheel", "editable_wheel", "build", "build_py", "install", "develop"}
# Advice for errors of CMake whose own text does not say what to do.
ADVICE = {
    "No CMAKE_CXX_COMPILER": "no C++ compiler was found; install g++ 12 or newer, or set CXX",
    "is not a full path to an existing compiler": "the compiler that CXX names was not found; set CXX to g++ 12 or newer",
    "CMAKE_MAKE_PROGRAM is not set": "neither ninja nor make was found; run `pip install ninja`",
}


def reason(output: str) -> str:
    """Return one line about why CMake failed: our own error message, or advice about CMake's."""
    for part, advice in ADVICE.items():
        if part in re.sub(r"\s+", " ", output):
            return advice
    # CMake prints a message in indented lines after "CMake Error at FILE:LINE (message):", then an empty line.
    message = re.search(r"^CMake Error at .*\(message\):\n((?: +.*\n)+)", output, re.MULTILINE)
    if message:
        return " ".join(message[1].split())
    print(output, file=sys.stderr)
    return "cmake could not configure the build; see above"


def configure() -> None:
    """Run CMake's configure step, which also writes build.json. CMAKE_ARGS holds further arguments."""
    if shutil.which("cmake") is None:
        sys.exit("shoestring: cmake was not found; install it, for example with `pip install cmake`")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    if (BUILD / "CMakeCache.txt").exists():
        generator = []  # an existing build folder keeps its CMake generator
    arguments = os.environ.get("CMAKE_ARGS", "").split()
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    done = subprocess.run(
        ["cmake", "-S", ROOT, "-B", BUILD, *generator, python, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"shoestring: {reason(done.stdout)}")
    print(done.stdout, end="")


def compile_and_install() -> None:
    """Build the libraries, and install them into python/shoestring."""
    # At most two parallel jobs by default: compiling one file that includes LibTorch takes up to 1.5 GB of
    # memory.
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(min(os.cpu_count() or 1, 2)))
    for command in (
        ["cmake", "--build", BUILD, "--target", "libraries", "--parallel", jobs],
        ["cmake", "--install", BUILD, "--prefix", ROOT / "python/shoestring"],
    ):
        done = subprocess.run(command)
        if done.returncode != 0:
            sys.exit(
                f"shoestring: `{' '.join(map(str, command[:3]))}` failed; the first error above says why"
            )


def built_for() -> tuple[str, list[str]]:
    """Return the local version and the requirements of a wheel: the libraries serve one minor of PyTorch."""
    build = json.loads((BUILD / "build.json").read_text())
    major, minor = map(int, build["torch"].split(".")[:2])
    device = "cpu" if build["cuda"] is None else "cu" + build["cuda"].replace(".", "")
    return f"+torch{major}.{minor}.{device}", [f"torch>={major}.{minor},<{major}.{minor + 1}"]


class BuildPy(build_py):
    """Build the libraries before setuptools collects the package's files."""

    def run(self) -> None:
        compile_and_install()
        self.data_files = self._get_data_files()
        super().run()


class PlatformWheel(bdist_wheel):
    """Tag the wheel for any Python version: the libraries depend on the platform, but not on Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


local, torch = "", ["torch>=2.11"]
if COMMANDS & set(sys.argv[1:]):
    configure()
    local, torch = built_for()
# setuptools copies the package here before it packs it, and would pack modules that have been removed since.
copies = BUILD / "setuptools"
if "bdist_wheel" in sys.argv:
    shutil.rmtree(copies, ignore_errors=True)

setup(
    version=VERSION + local,
    install_requires=torch,
    distclass=PlatformDistribution,
    options={"build": {"build_base": str(copies)}},
    cmdclass={"build_py": BuildPy, "bdist_wheel": PlatformWheel},
)
