"""Build the native libraries with CMake; only the CMake files describe that build.

CMake installs libraries, headers and the CMake package into the folder of the Python package. A wheel, an
editable install and an install prefix therefore have the same files.
"""

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
VERSION = re.search(r'VERSION "(.+)"', (ROOT / "csrc/include/shoestring/version.h").read_text())[1]


def run_cmake() -> None:
    """Configure, build, and install into python/shoestring. CMAKE_ARGS holds further arguments of CMake."""
    build = Path(os.environ.get("SHOESTRING_BUILD_DIR", ROOT / "build"))
    package = ROOT / "python/shoestring"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    if (build / "CMakeCache.txt").exists():
        generator = []  # an existing build folder keeps its CMake generator
    # At most two parallel jobs by default: compiling one file that includes LibTorch takes up to 1.5 GB of
    # memory.
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(min(os.cpu_count() or 1, 2)))
    arguments = os.environ.get("CMAKE_ARGS", "").split()
    for command in (
        ["cmake", "-S", ROOT, "-B", build, *generator, f"-DPython3_EXECUTABLE={sys.executable}", *arguments],
        ["cmake", "--build", build, "--parallel", jobs],
        ["cmake", "--install", build, "--prefix", package],
    ):
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            sys.exit("shoestring: cmake was not found; install it, for example with `pip install cmake`")
        except subprocess.CalledProcessError as error:
            sys.exit(
                f"shoestring: `{' '.join(map(str, command[:3]))} ...` failed with code {error.returncode}; see above"
            )


class BuildPy(build_py):
    """Build the libraries before setuptools collects the package's files."""

    def run(self) -> None:
        run_cmake()
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


setup(
    version=VERSION,
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildPy, "bdist_wheel": PlatformWheel},
)
