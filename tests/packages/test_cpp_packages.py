"""The C++ packages, a .tar.gz and a Debian package, hold the same libraries, and programs build against each."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from build_folder import BUILD, REPOSITORY

pytestmark = pytest.mark.skipif(not (BUILD / "CPackConfig.cmake").exists(), reason="no build folder to pack")
CONSUMER = REPOSITORY / "tests/consumer"


def run(*command: object, cwd: Path = REPOSITORY) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def libtorch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the packages, and under "tar" and "deb" the install prefixes that unpacking them gives."""
    folder = tmp_path_factory.mktemp("packages")
    run("cpack", "-B", folder, cwd=BUILD)
    (archive,) = folder.glob("shoestring-*.tar.gz")
    (debian,) = folder.glob("libshoestring-dev_*.deb")
    run("tar", "xf", archive, "-C", folder)
    run("dpkg", "-x", debian, folder / "root")
    return {
        "archive": archive,
        "debian": debian,
        "tar": folder / archive.name.removesuffix(".tar.gz"),
        "deb": folder / "root/usr",
    }


def test_both_hold_the_same_files(packages: dict[str, Path]) -> None:
    trees = [
        {
            path.relative_to(packages[kind]): path.read_bytes()
            for path in packages[kind].rglob("*")
            if path.is_file()
        }
        for kind in ("tar", "deb")
    ]
    assert trees[0] == trees[1]
    names = {str(name) for name in trees[0]}
    headers = {
        str(path.relative_to(REPOSITORY / "csrc")) for path in (REPOSITORY / "csrc/include").rglob("*.h")
    }
    assert headers <= names and "share/doc/libshoestring-dev/LICENSE" in names
    assert {"lib/libshoestring.so", "share/cmake/shoestring/shoestringConfig.cmake"} <= names
    assert "lib/build.json" not in names  # a file of the Python package, whose name means nothing in /usr/lib
    # No file names a folder of this machine.
    for name, content in trees[0].items():
        assert str(REPOSITORY).encode() not in content and str(libtorch()).encode() not in content, name


def test_the_debian_package_declares_what_its_libraries_need(packages: dict[str, Path]) -> None:
    fields = dict(
        line.split(": ", 1) for line in run("dpkg-deb", "-f", packages["debian"]).splitlines() if ": " in line
    )
    assert fields["Package"] == "libshoestring-dev"
    assert re.fullmatch(r"\d+\.\d+\.\d+\+torch2\.\d+\.(cpu|cu\d+)", fields["Version"])
    needed = {part.split()[0] for part in fields["Depends"].split(", ")}
    assert {"libc6", "libgomp1", "libstdc++6"} <= needed
    # liburing and PCRE2 are linked statically, and LibTorch is no Debian package.
    assert not {name for name in needed if re.match("liburing|libpcre|libtorch", name)}


def test_the_libraries_search_their_own_folder_alone(packages: dict[str, Path]) -> None:
    for library in packages["deb"].rglob("*.so"):
        assert re.findall(r"R(?:UN)?PATH.*\[(.*)\]", run("readelf", "-d", library)) == ["$ORIGIN"]


def configure(prefix: Path, folder: Path) -> None:
    run("cmake", "-S", CONSUMER, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}", f"-DTorch_ROOT={libtorch()}")


def test_a_program_builds_against_the_archive(packages: dict[str, Path], tmp_path: Path) -> None:
    """The program that the archive built also runs with the library of the Debian package."""
    configure(packages["tar"], tmp_path)
    run("cmake", "--build", tmp_path, "--parallel", "2")
    for program in ("api", "dispatcher"):
        for environment in ([], [f"LD_LIBRARY_PATH={packages['deb'] / 'lib'}"]):
            out = run("env", "-i", *environment, tmp_path / program)
            assert "ok " in out and "not ok" not in out
    loaded = run("env", "-i", "LD_TRACE_LOADED_OBJECTS=1", tmp_path / "dispatcher")
    assert f"{packages['tar']}/lib/libshoestring.so" in loaded and "not found" not in loaded


@pytest.mark.parametrize("target", ["dispatcher", pytest.param("api", marks=pytest.mark.nightly)])
def test_a_program_builds_against_the_debian_package(
    target: str, packages: dict[str, Path], tmp_path: Path
) -> None:
    configure(packages["deb"], tmp_path)
    run("cmake", "--build", tmp_path, "--target", target)
    assert "not ok" not in run("env", "-i", tmp_path / target)
    loaded = run("env", "-i", "LD_TRACE_LOADED_OBJECTS=1", tmp_path / target)
    assert f"{packages['deb']}/lib/libshoestring.so" in loaded and "not found" not in loaded


def test_find_package_without_libtorch_says_what_to_set(packages: dict[str, Path], tmp_path: Path) -> None:
    command = ["cmake", "-S", CONSUMER, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={packages['deb']}"]
    done = subprocess.run([*command, f"-DTorch_ROOT={tmp_path}/none"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "LibTorch was not found: set Torch_ROOT to a folder that holds" in " ".join(done.stderr.split())


def test_find_package_refuses_another_libtorch(packages: dict[str, Path], tmp_path: Path) -> None:
    """A LibTorch of another minor version is named, and so is the one that is expected."""
    for name in ("include/torch/csrc/api/include/torch/version.h", "include/torch/headeronly/version.h"):
        header = tmp_path / "libtorch" / name
        header.parent.mkdir(parents=True)
        text = (libtorch() / name).read_text()
        header.write_text(re.sub(r"(#define TORCH_VERSION_MINOR) \d+", r"\1 99", text))
    command = ["cmake", "-S", CONSUMER, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={packages['tar']}"]
    done = subprocess.run([*command, f"-DTorch_ROOT={tmp_path}/libtorch"], capture_output=True, text=True)
    assert done.returncode == 1
    message = " ".join(done.stderr.split())
    assert re.search(r"built for LibTorch 2\.\d+\.\d+, but .*/libtorch is 2\.99\.\d+: reinstall", message), (
        message
    )
