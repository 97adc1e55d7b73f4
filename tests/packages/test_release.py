"""``make release`` names everything that keeps a tree from being a release, one line for each."""

import subprocess
import sys
from pathlib import Path

import pytest

from build_folder import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))
import release


def git(tree: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a repository that is a release of version 2.3.4."""
    header = tmp_path / "csrc/include/shoestring/core/version.h"
    header.parent.mkdir(parents=True)
    header.write_text('#define SHOESTRING_VERSION "2.3.4"\n')
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 2.3.4\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 2.3.4 (2030-01-02)\n- x\n\n## 2.3.3 (2029-01-02)\n"
    )
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    return tmp_path


def test_a_release_has_no_problems(tree: Path) -> None:
    assert release.problems(tree) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "CITATION.cff",
            "version: 2.3.3\n",
            "CITATION.cff has version 2.3.3, and version.h has 2.3.4; write 2.3.4",
        ),
        ("CHANGELOG.md", "## 2.3.4 (unreleased)\n", "must be '2.3.4 (YYYY-MM-DD)'"),
        ("CHANGELOG.md", "## 2.3.3 (2030-01-02)\n", "begins with '2.3.3 (2030-01-02)'"),
    ],
)
def test_a_file_that_disagrees_is_named(tree: Path, file: str, text: str, expected: str) -> None:
    (tree / file).write_text(text)
    git(tree, "commit", "-q", "-a", "-m", "y")
    (found,) = release.problems(tree)
    assert expected in found and "\n" not in found


def test_a_changed_tree_is_named(tree: Path) -> None:
    (tree / "new.py").write_text("")
    assert release.problems(tree) == ["the tree has 1 uncommitted changes (new.py); commit or remove them"]


def test_a_version_that_another_commit_has_is_named(tree: Path) -> None:
    git(tree, "tag", "v2.3.4")
    assert release.problems(tree) == []
    git(tree, "commit", "-q", "--allow-empty", "-m", "z")
    assert release.problems(tree) == ["the tag v2.3.4 is another commit; raise the version in version.h"]


def test_tests_count_for_their_commit_alone(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    build = tmp_path_factory.mktemp("build")
    assert not release.tested(tree, build)
    (build / "tested").write_text(release.git(tree, "rev-parse", "HEAD") + "\n")
    assert release.tested(tree, build)
    git(tree, "commit", "-q", "--allow-empty", "-m", "z")
    assert not release.tested(tree, build)


def test_this_repository_agrees_with_itself() -> None:
    """Between releases the changelog may say "unreleased", and the tree may be changed; versions agree always."""
    assert not [problem for problem in release.problems(REPOSITORY) if "CITATION" in problem]


def test_a_build_for_few_gpus_is_no_release(tmp_path: Path) -> None:
    (tmp_path / "build.json").write_text('{"cuda": "13.0", "gpus": ["75", "80", "90a"]}')
    assert release.missing_gpus(REPOSITORY, tmp_path) == ["86", "89", "100", "120", "ptx"]
    (tmp_path / "build.json").write_text('{"cuda": null, "gpus": []}')
    assert release.missing_gpus(REPOSITORY, tmp_path) == []
