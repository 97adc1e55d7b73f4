"""Check that the tree is a release, then build the source distribution, the wheel, C++ packages and documentation.

Everything is checked before anything is built. Results go to dist/, with SHA256SUMS. --check builds nothing.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read(root: Path, name: str, pattern: str) -> str | None:
    """Return what the first group of `pattern` matches in a file, or None if it does not match."""
    match = re.search(pattern, (root / name).read_text(), re.MULTILINE)
    return match[1] if match else None


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def problems(root: Path) -> list[str]:
    """Return why the tree is no release, one line for each reason."""
    found = []
    version = read(root, "csrc/include/shoestring/core/version.h", r'VERSION "(.+)"')
    cited = read(root, "CITATION.cff", r"^version: (\S+)$")
    if cited != version:
        found.append(
            f"CITATION.cff has version {cited}, and version.h has {version}; write {version} in both"
        )
    heading = read(root, "CHANGELOG.md", r"^## (.+)$") or ""
    if not re.fullmatch(rf"{re.escape(version or '')} \(\d{{4}}-\d\d-\d\d\)", heading):
        found.append(
            f"CHANGELOG.md begins with '{heading}'; its first section must be '{version} (YYYY-MM-DD)'"
        )
    changed = git(root, "status", "--porcelain").splitlines()
    if changed:
        found.append(
            f"the tree has {len(changed)} uncommitted changes ({changed[0].split()[-1]}); commit or remove them"
        )
    elif f"v{version}" in git(root, "tag", "--list").split() and git(
        root, "rev-list", "-1", f"v{version}"
    ) != git(root, "rev-parse", "HEAD"):
        found.append(f"the tag v{version} is another commit; raise the version in version.h")
    return found


def tested(root: Path, build: Path) -> bool:
    """Return whether `make test` and `make test-all` have passed on this commit; scripts/test.sh writes the file."""
    stamp = build / "tested"
    return stamp.is_file() and stamp.read_text().strip() == git(root, "rev-parse", "HEAD")


def missing_gpus(root: Path, build: Path) -> list[str]:
    """Return the GPUs of a wheel (cmake/Cuda.cmake) that the build has no kernels for; none if it has no CUDA."""
    described = json.loads((build / "build.json").read_text())
    wanted = (read(root, "cmake/Cuda.cmake", r"^set\(_wheel (.+)\)$") or "").split()
    return [gpu for gpu in wanted if described["cuda"] is not None and gpu not in described["gpus"]]


def make(*targets: str) -> None:
    print(f"== make {' '.join(targets)}", flush=True)
    if subprocess.run(["make", *targets], cwd=ROOT).returncode != 0:
        sys.exit(f"release.py: `make {' '.join(targets)}` failed; see above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path, help="the build folder of `make build`")
    parser.add_argument("--check", action="store_true", help="check only, and build nothing")
    options = parser.parse_args()
    found = problems(ROOT)
    if found:
        sys.exit("\n".join(f"release.py: {line}" for line in found))
    if not tested(ROOT, options.build):
        if options.check:
            sys.exit("release.py: `make test` and `make test-all` have not passed on this commit; run them")
        make("test")
        make("test-all")  # of its own: it builds other targets
    if options.check:
        print("release.py: the tree is ready for a release")
        return
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    make("sdist", "wheel", "packages", "docs")
    missing = missing_gpus(ROOT, options.build)
    if missing:
        sys.exit(
            f"release.py: the kernels were not built for {', '.join(missing)}; configure {options.build} with "
            "-DSHOESTRING_CUDA_ARCHITECTURES=wheel"
        )
    html = ROOT / "build-docs/html"
    if not html.is_dir():
        sys.exit(f"release.py: `make docs` did not write {html.relative_to(ROOT)}")
    version = read(ROOT, "csrc/include/shoestring/core/version.h", r'VERSION "(.+)"')
    with tarfile.open(out / f"shoestring-{version}-docs.tar.gz", "w:gz") as archive:
        archive.add(html, f"shoestring-{version}-docs")
    files = sorted(path for path in out.iterdir() if path.is_file())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    for path in files:
        print(f"{path.stat().st_size / 2**20:8.1f} MiB  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
