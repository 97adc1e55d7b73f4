"""Python environments and containers for the tests of packages: what a user's machine has, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))


def closure(names: Iterable[str]) -> set[str]:
    """Return distributions and all that they require on this machine, as normalised names."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # a requirement of another platform
        found.add(name)
        for requirement in distribution.requires or []:
            match = re.match(r"[A-Za-z0-9._-]+", requirement)
            if match and "extra ==" not in requirement:
                waiting.append(match[0])
        # The CUDA packages that PyTorch requires name the libraries themselves as extras.
        waiting += [other for other in CUDA if name == "cuda-toolkit"]
    return found


CUDA = sorted(
    name for d in metadata.distributions() if (name := d.metadata["Name"] or "").startswith("nvidia-")
)


def environment(folder: Path, names: Iterable[str]) -> Path:
    """Make a virtual environment with links to some of this environment's distributions; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in names:
        for file in metadata.distribution(name).files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(SITE / top)
    return folder / "bin/python"


def repack(name: str, folder: Path) -> None:
    """Write a wheel of an installed distribution into `folder`, for pip without a network."""
    distribution = metadata.distribution(name)
    assert distribution.files
    path = folder / f"{name}-{distribution.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in distribution.files:
            if ".." not in file.parts and "__pycache__" not in file.parts and file.locate().is_file():
                archive.write(file.locate(), str(file))


def container(
    python: Path, read: Iterable[Path], command: list[str], environment: Path, work: Path
) -> list[str]:
    """Return the command line that runs `command` in a container without compilers, CMake, headers and CUDA toolkit.

    The container has the shared libraries of the system, the interpreter of `python`, this environment's
    packages without PyTorch's headers, and the paths in `read`. It has no network. `environment` and `work`, its
    working directory, are writable.
    """
    bwrap = shutil.which("bwrap")
    assert bwrap, "bubblewrap was not found; run `make setup`, or `apt install bubblewrap`"
    base = Path(sys.base_prefix)
    stdlib = Path(sysconfig.get_path("stdlib"))
    executable = (base / "bin" / f"python3.{sys.version_info.minor}").resolve()
    line = [
        bwrap,
        "--unshare-all",
        "--die-with-parent",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
    ]
    for path in ("/lib", "/lib64"):
        if Path(path).is_symlink():
            line += ["--symlink", os.readlink(path), path]
        elif Path(path).is_dir():
            line += ["--ro-bind", path, path]
    libraries = sorted({Path("/usr/lib64"), *Path("/usr/lib").glob("*-linux-gnu")})
    mounts = [*libraries, Path("/etc/ld.so.cache"), Path("/etc/ld.so.conf"), Path("/etc/ld.so.conf.d")]
    mounts += [executable, stdlib, *base.glob("lib/libpython3*"), SITE]
    mounts += [Path("/bin/sh").resolve()]
    for path in mounts:
        if path.exists() and not path.is_symlink():
            line += ["--ro-bind", str(path), str(path)]
    line += (
        ["--symlink", executable.name, str(executable.parent / "python3")]
        if executable.name != "python3"
        else []
    )
    line += ["--tmpfs", str(SITE / "torch/include")]
    for path in read:
        line += ["--ro-bind", str(path), str(path)]
    for path in (environment, work):
        line += ["--bind", str(path), str(path)]
    line += ["--chdir", str(work), "--clearenv", "--setenv", "HOME", str(work), "--setenv", "USER", "user"]
    return [*line, "--setenv", "PATH", f"{python.parent}:/usr/local/bin:/usr/bin:/bin", *command]
