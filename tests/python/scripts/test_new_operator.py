"""The files that new_operator.py writes; tests/packages/test_new_operator_builds.py builds them."""

import ast
import difflib
import re
import shutil
import sys
from pathlib import Path

import pytest

from build_folder import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
import new_operator

EDITED = (
    "csrc/include/shoestring/layers/ops.h",
    "python/shoestring/ops.py",
    "docs/guides/layers.md",
    "CHANGELOG.md",
)


@pytest.mark.parametrize("inputs", [["x"], ["gate", "up", "more"]], ids=len)
@pytest.mark.parametrize("option", ["", "offset"])
def test_six_new_files_and_four_edits(tmp_path: Path, inputs: list[str], option: str) -> None:
    for path in EDITED:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, tmp_path / path)
    values = new_operator.values_of("layers", "soft_gate", inputs, option, 1.0)
    written = new_operator.write(tmp_path, values)
    assert len(written) == 10 and {*EDITED} < {*written}
    for path in written:
        text = (tmp_path / path).read_text()
        old = (REPOSITORY / path).read_text() if path in EDITED else ""
        assert "soft_gate" in text and not re.search(r"@\w+@", text), path
        if path in EDITED:
            changes = {line[0] for line in difflib.ndiff(old.splitlines(), text.splitlines())}
            assert changes == {" ", "+"} and len(text.splitlines()) - len(old.splitlines()) <= 3, path
        if path.endswith(".py"):
            ast.parse(text)
        if option and not path.endswith(("_simd.cpp", ".cu", "ops.py", ".md")):
            assert option in text, path
