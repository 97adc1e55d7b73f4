"""Removes each barrier, ``__syncwarp`` and asynchronous wait in ``cuda/`` in turn. The tests should fail.

If the tests still pass, the barrier survives: no kernel needs it, or no test shows the need. The script
changes a copy of ``cuda/`` in the build folder, and temporarily builds the emulator from that copy.

    python tests/simt/remove_barriers.py [--build DIR] [--only TEXT]    # where file:line contains TEXT
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SYNCHRONISATION = re.compile(
    r"\b(?:__syncthreads|__syncwarp|__threadfence|__threadfence_block|cp_async_wait(?:<[^;>]*>)?|barrier_sync|"
    r"barrier_arrive|mbarrier_wait|mbarrier_arrive|mbarrier_init_fence|async_fence|wgmma_fence|wgmma_commit|"
    r"wgmma_wait(?:<[^;>]*>)?)\([^;{}]*\);"
)


def sites(source: Path) -> list[tuple[int, int, int]]:
    """Return line number, begin offset and end offset of each synchronising statement in a source file."""
    text = source.read_text()
    code = re.sub(r"//[^\n]*", lambda m: " " * len(m.group()), text)
    return [(text.count("\n", 0, m.start()) + 1, m.start(), m.end()) for m in SYNCHRONISATION.finditer(code)]


def run(*command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command and return its completed process. ``more`` is added to the environment."""
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | more
    )


def first_error(output: str) -> str:
    """Return the emulator's error if there is one, else the first failure that a test suite reports."""
    found = re.search(r"launch failed: (.*)", output) or re.search(r"^(?:E  +|FAILED )(.*)", output, re.M)
    return (found.group(1) if found else (output.strip().splitlines() or ["it printed nothing"])[-1])[:140]


def tests(build: Path) -> tuple[bool, str]:
    """Run the C++ and Python tests of the emulator. Return whether all pass, and the first failure."""
    built = run("cmake", "--build", build, "--target", "shoestring_simt", "simt_tests")
    if built.returncode != 0:
        sys.exit(f"the build failed:\n{built.stdout[-3000:]}{built.stderr[-1000:]}")
    own = run(build / "tests/simt/simt_tests")
    if own.returncode != 0:
        return False, first_error(own.stdout)
    suite = run(
        sys.executable,
        "-m",
        "pytest",
        "--backend=simt",
        "-x",
        "-q",
        SHOESTRING_BUILD=str(build),
        PYTHONPATH=str(ROOT / "python"),
    )
    return suite.returncode == 0, first_error(suite.stdout)


def main() -> int:
    """Remove each synchronising statement in turn. Return 1 if the tests pass without one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only sites whose file:line contains TEXT")
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build", help="the build folder of `make build-tests`"
    )
    options = parser.parse_args()
    build = options.build.resolve()
    kernels = build / "remove_barriers" / "cuda"
    shutil.rmtree(kernels.parent, ignore_errors=True)
    shutil.copytree(ROOT / "cuda", kernels)
    survivors = []
    run("cmake", build, f"-DSIMT_KERNELS={kernels}")
    try:
        passed, error = tests(build)
        if not passed:
            sys.exit(f"the suites fail before anything is removed: {error}")
        for file in sorted(p for p in kernels.rglob("*") if p.suffix in (".cu", ".h")):
            text = file.read_text()
            for line, begin, end in sites(file):
                name = f"cuda/{file.relative_to(kernels)}:{line}"
                if options.only not in name:
                    continue
                file.write_text(text[:begin] + ";" + text[end:])
                passed, error = tests(build)
                file.write_text(text)
                print(
                    f"{name}: {text[begin:end]} {'SURVIVED' if passed else 'noticed: ' + error}", flush=True
                )
                if passed:
                    survivors.append(name)
    finally:
        run("cmake", build, "-USIMT_KERNELS")
        run("cmake", "--build", build, "--target", "shoestring_simt", "simt_tests")
        shutil.rmtree(kernels.parent)
    print(f"{len(survivors)} survived" + (": " + ", ".join(survivors) if survivors else ""))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
