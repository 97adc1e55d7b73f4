"""The wheel installs and trains where there is no compiler, CMake, header or CUDA toolkit, in less than a minute."""

import json
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from environments import closure, container, environment

from build_folder import BUILD, REPOSITORY

pytestmark = pytest.mark.skipif(
    not (BUILD / "CMakeCache.txt").exists(), reason="no build folder to make the wheel from"
)

# The script that a user of a new installation runs first.
QUICK_START = """
import os, shutil
import torch, shoestring

for tool in "gcc g++ c++ cc clang clang++ cmake ninja make nvcc".split():
    assert shutil.which(tool) is None, tool
headers = os.path.join(os.path.dirname(torch.__file__), "include")
for folder in ("/usr/include", "/usr/local/cuda", "/usr/lib/gcc", headers):
    assert not os.path.isdir(folder) or not os.listdir(folder), folder

torch.manual_seed(0)
body, head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 50, bias=False)
optimizer = shoestring.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-2)
inputs, targets = torch.randn(64, 16), torch.randint(50, (64,))
losses = []
for _ in range(20):
    loss = shoestring.linear_cross_entropy(body(inputs), head.weight, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.9 * losses[0], losses

model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
model = shoestring.lora.apply(model, rank=4, alpha=8, target_modules=["0"])
trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
model(inputs).sum().backward()
assert trained and all("lora" in name for name in trained), trained
shoestring.lora.save_adapter(model, "adapter")
print("trained with", shoestring.__file__)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, REPOSITORY / "scripts/make_wheel.py", BUILD, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel, done.stdout


def test_its_name_and_metadata_say_what_it_was_built_for(made: tuple[Path, str]) -> None:
    wheel, report = made
    build = json.loads((BUILD / "build.json").read_text())
    major, minor = map(int, build["torch"].split(".")[:2])
    device = "cpu" if build["cuda"] is None else "cu" + build["cuda"].replace(".", "")
    version = f"{build['version']}+torch{major}.{minor}.{device}"
    assert re.fullmatch(rf"shoestring-{re.escape(version)}-py3-none-manylinux_2_28_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as opened:
        metadata = opened.read(f"shoestring-{version}.dist-info/METADATA").decode()
        names = opened.namelist()
    assert f"\nVersion: {version}\n" in metadata
    assert re.findall(r"^Requires-Dist: (torch\b.*)$", metadata, re.MULTILINE) == [
        f"torch<{major}.{minor + 1},>={major}.{minor}"
    ]
    assert "requires: torch<" in report and "newest symbols: GLIBC_2." in report
    for name in ("LICENSE", "NOTICE"):
        assert f"shoestring-{version}.dist-info/licenses/{name}" in names
    # Nothing is bundled: neither PyTorch's libraries nor a second OpenMP.
    libraries = {name for name in names if ".so" in name}
    ours = ["", "_distributed", "_monitor", *(["_cuda"] if build["cuda"] else [])]
    assert libraries == {f"shoestring/lib/libshoestring{name}.so" for name in ours}


def test_it_holds_the_python_sources_of_this_tree_alone(made: tuple[Path, str]) -> None:
    with zipfile.ZipFile(made[0]) as opened:
        packed = {name for name in opened.namelist() if name.endswith(".py")}
    sources = {str(path.relative_to(REPOSITORY / "python")) for path in (REPOSITORY / "python").rglob("*.py")}
    assert packed == sources


def test_its_libraries_find_pytorch_without_a_path_of_this_machine(
    made: tuple[Path, str], tmp_path: Path
) -> None:
    with zipfile.ZipFile(made[0]) as opened:
        opened.extractall(tmp_path)
    for library in tmp_path.rglob("*.so"):
        if library.name == "libshoestring_monitor.so":  # links no PyTorch
            continue
        out = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
        (found,) = re.findall(r"R(?:UN)?PATH.*\[(.*)\]", out)
        folders = found.split(":")
        assert "$ORIGIN/../../torch/lib" in folders and all(
            folder.startswith("$ORIGIN") for folder in folders
        )
    text = b"".join(path.read_bytes() for path in tmp_path.rglob("*.cmake"))
    assert str(REPOSITORY).encode() not in text and sys.prefix.encode() not in text


def test_it_installs_and_trains_without_a_compiler(
    made: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = environment(tmp_path / "env", closure(["torch", "numpy"]) | {"pip"})
    (tmp_path / "start.py").write_text(QUICK_START)
    work = tmp_path / "work"
    work.mkdir()

    def run(*arguments: object) -> str:
        command = [str(python), *map(str, arguments)]
        line = container(python, [made[0].parent, tmp_path / "start.py"], command, tmp_path / "env", work)
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    start = time.monotonic()
    run("-m", "pip", "install", "-q", "--no-index", "--no-warn-script-location", made[0])
    installed = time.monotonic() - start
    out = run(tmp_path / "start.py")
    total = time.monotonic() - start
    assert f"trained with {tmp_path}/env/lib/" in out
    with capsys.disabled():
        print(
            f"\nwheel: installed in {installed:.1f} s, installed and trained in {total:.1f} s, without a compiler"
        )
    assert total < 60


def test_pip_refuses_it_where_pytorch_is_of_another_minor(made: tuple[Path, str], tmp_path: Path) -> None:
    """One line of pip's own says which PyTorch the wheel requires."""
    python = environment(tmp_path / "env", ["pip"])
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    other = site / "torch-2.99.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n")
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-index", made[0]], capture_output=True, text=True
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"ERROR: .*torch<2\.\d+,>=2\.\d+", done.stderr), done.stderr
