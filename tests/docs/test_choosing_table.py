"""The memory that docs/choosing.md names is what `shoestring estimate` computes now."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoestring.cli.app import app
from shoestring.training.estimate.config import EstimateConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from processes_tables import LLAMA_8B  # noqa: E402

PAGE = (ROOT / "docs/choosing.md").read_text()


def estimated(options: list[str]) -> str:
    """Return the places of a step's memory as the table writes them, such as ``3.16, disk 1.28``."""
    result = CliRunner().invoke(app, ["estimate", *options])
    assert result.exit_code == 0, result.output
    found = re.findall(r"^(device|host|disk), ([\d.]+) (GB|MB)$", result.output, re.MULTILINE)
    places = {place: n if unit == "GB" else f"{float(n) / 1000:.2f}" for place, n, unit in found}
    return ", ".join(
        [places["device"], *(f"{place} {n}" for place, n in places.items() if place != "device")]
    )


@pytest.mark.parametrize("column", [1, 2], ids=["1.1 B", "8 B"])
def test_memory_by_way_of_training(column: int, tmp_path: Path) -> None:
    block = re.search(r'```bash\nE="shoestring estimate ([^"]*)".*\n((?:\$E .*\n)+)```', PAGE)
    assert block is not None
    common = shlex.split(block[1])
    if column == 2:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
        common[common.index("--model") + 1] = str(tmp_path)
        del common[common.index("--vocab-size") : common.index("--vocab-size") + 2]
    table = PAGE.split("| what is trained, and how | 1.1 B | 8 B |\n", 1)[1].split("\n\n")[0].splitlines()[1:]
    commands = block[2].strip().splitlines()
    for row, command in zip(table, commands, strict=True):
        assert estimated(common + shlex.split(command)[1:]) == row.split(" | ")[column].strip(" |"), row


def test_default_of_double_quant() -> None:
    """The table has the commands above it, without --double-quant."""
    assert ("the default of `estimate`" in PAGE) == (not EstimateConfig(model="1b").double_quant)
