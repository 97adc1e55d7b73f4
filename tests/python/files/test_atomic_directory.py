"""Test atomic_directory, which replaces a folder in one step if possible, or else file by file.

Foreign files and folders, which atomic_directory has not written itself, stay.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from shoestring.files import atomic as files
from shoestring.files.atomic import atomic_directory, exchange_obstacle

# flags of the system calls unshare(2) and mount(2)
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000


def fill(path: Path, **content: str) -> None:
    with atomic_directory(path) as folder:
        for name, text in content.items():
            (folder / name.replace("_json", ".json")).write_text(text)


def add_foreign(path: Path) -> None:
    """Create files, folders and links as a person might add them to a model's folder (foreign files)."""
    (path / "README.md").write_text("mine")
    (path / "README.md").chmod(0o640)
    (path / "model_backup.safetensors").write_text("also mine")
    (path / "notes" / "deep").mkdir(parents=True)
    (path / "notes" / "deep" / "a").write_text("a")
    (path / "notes" / "config.json").write_text("of something else")
    (path / "empty").mkdir(mode=0o700)
    (path / "link").symlink_to("notes/deep")
    (path / "dangling").symlink_to("/nowhere/at all")
    os.mkfifo(path / "pipe")


def snapshot(path: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for entry in path.rglob("*"):
        status, name = entry.lstat(), str(entry.relative_to(path))
        if entry.is_symlink():
            found[name] = os.readlink(entry)
        else:
            found[name] = (oct(status.st_mode), entry.read_text() if entry.is_file() else None)
    return found


def test_foreign_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "model"
    fill(path, config_json="old", generation_config_json="old")
    for name in ("model.safetensors", "model-00001-of-00003.safetensors", "model.safetensors.index.json"):
        (path / name).write_text("old")
    own = set(snapshot(path))
    add_foreign(path)
    path.chmod(0o750)
    foreign = {name: value for name, value in snapshot(path).items() if name not in own}
    inode = (path / "notes/deep/a").stat().st_ino
    fill(path, config_json="new", other="new")
    found = snapshot(path)
    assert {name: found.pop(name) for name in foreign} == foreign
    assert set(found) == {"config.json", "other"} and (path / "config.json").read_text() == "new"
    # The file that a user added has kept its inode, so it is not a copy.
    assert (path / "notes/deep/a").stat().st_ino == inode
    assert path.stat().st_mode & 0o777 == 0o750
    assert os.listdir(tmp_path) == ["model"]


def test_the_new_file_of_a_name_wins_and_folders_merge(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / "inner").mkdir(parents=True)
    for name in ("same", "inner/same", "inner/other"):
        (path / name).write_text("old")
    with atomic_directory(path) as folder:
        (folder / "inner").mkdir()
        for name in ("same", "inner/same"):
            (folder / name).write_text("new")
    texts = {str(p.relative_to(path)): p.read_text() for p in path.rglob("*") if p.is_file()}
    assert texts == {"same": "new", "inner/same": "new", "inner/other": "old"}


def test_an_exception_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model"
    fill(path, config_json="old")
    add_foreign(path)
    before = snapshot(tmp_path)
    with pytest.raises(KeyboardInterrupt), atomic_directory(path) as folder:
        (folder / "config.json").write_text("new")
        raise KeyboardInterrupt
    assert snapshot(tmp_path) == before


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/model")
    for text in ("first", "second"):
        fill(tmp_path / "link", config_json=text)
        assert os.readlink(tmp_path / "link") == "elsewhere/model"
        assert (tmp_path / "elsewhere/model/config.json").read_text() == text
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "link"] and os.listdir(tmp_path / "elsewhere") == [
        "model"
    ]


def test_folders_of_dead_processes_go_and_those_of_others_stay(tmp_path: Path) -> None:
    def die() -> None:
        with atomic_directory(tmp_path / "model") as folder:
            (folder / "large").write_text("x")
            os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    process.join()
    (leftover,) = tmp_path.iterdir()
    others = ["model.v2.partial", "model.0123456789.partial", "models.01234567.partial"]
    for name in others:
        (tmp_path / name).mkdir()
    # A writer of the folder `model` does not disturb another writer of this folder in a living process.
    with atomic_directory(tmp_path / "model") as first:
        fill(tmp_path / "model", config_json="second")
        (first / "config.json").write_text("first")
    assert not leftover.exists()
    assert sorted(os.listdir(tmp_path)) == sorted(["model", *others])
    assert (tmp_path / "model/config.json").read_text() == "first"


def read_together(path: Path) -> list[str]:
    """Open a folder and return the texts of its four files, even if another folder replaces it meanwhile."""
    folder, texts = os.open(path, os.O_RDONLY), []
    try:
        for name in ("config.json", "a", "b", "c"):
            with open(name, opener=lambda name, flags: os.open(name, flags, dir_fd=folder)) as file:
                texts.append(file.read())
    finally:
        os.close(folder)
    return texts


@pytest.mark.parametrize("foreign", [False, True])
def test_several_writers_leave_one_whole_folder(tmp_path: Path, foreign: bool) -> None:
    path = tmp_path / "model"
    if foreign:
        path.mkdir()
        (path / "mine").write_text("mine")
    start = multiprocessing.get_context("fork").Barrier(4)

    def write(number: int) -> None:
        start.wait()
        for i in range(15):
            fill(path, **dict.fromkeys(("config_json", "a", "b", "c"), f"{number} {i}"))

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        # Reading fails if the folder was replaced and deleted after it was opened, or if there is no folder
        # yet.
        with suppress(FileNotFoundError):
            assert len(set(read_together(path))) == 1
    assert [process.exitcode for process in processes] == [0] * 4
    assert os.listdir(tmp_path) == ["model"]
    assert len({(path / name).read_text() for name in ("config.json", "a", "b", "c")}) == 1
    assert not foreign or (path / "mine").read_text() == "mine"


def no_exchange(first: Path, second: Path) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def in_place(path: Path) -> None:
    """Replace a model in a folder that cannot be exchanged in one step; check that users' own files stay."""
    for name in ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (path / name).write_text("old")
    own = set(os.listdir(path))
    add_foreign(path)
    inode, foreign = (
        path.stat().st_ino,
        {name: value for name, value in snapshot(path).items() if name not in own},
    )
    fill(path, config_json="new", other="new")
    found = snapshot(path)
    assert {name: found.pop(name) for name in foreign} == foreign
    assert set(found) == {"config.json", "other"} and (path / "config.json").read_text() == "new"
    assert path.stat().st_ino == inode


def test_one_by_one_where_the_file_system_cannot_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_exchange", no_exchange)
    path = tmp_path / "model"
    path.mkdir()
    assert (
        exchange_obstacle(path)
        == f"in {tmp_path} folders cannot be exchanged or files linked (Invalid argument)"
    )
    in_place(path)
    assert os.listdir(tmp_path) == ["model"]


def test_config_json_goes_first_and_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_exchange", no_exchange)
    path, seen = tmp_path / "model", []
    fill(path, config_json="old", weights="old")
    (path / "model.safetensors").write_text("old")
    replace, unlink = os.replace, Path.unlink

    def record(call: Callable[..., None]) -> Callable[..., None]:
        def recorded(*arguments: Path, **options: bool) -> None:
            call(*arguments, **options)
            seen.append((path / "config.json").exists())

        return recorded

    with atomic_directory(path) as folder:
        for name in ("config.json", "a", "weights", "zz"):
            (folder / name).write_text("new")
        monkeypatch.setattr(os, "replace", record(replace))
        monkeypatch.setattr(Path, "unlink", record(unlink))
    # The test records seven file operations. Three delete config.json, the index and model.safetensors. Four
    # write the new files, and config.json is the last of these.
    assert seen == [False] * 6 + [True]


def test_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model" / "inside").mkdir(parents=True)
    for inside in (".", "inside"):
        monkeypatch.chdir(tmp_path / "model" / inside)
        assert exchange_obstacle(tmp_path / "model") == "it is, or holds, the current directory"
    monkeypatch.chdir(tmp_path / "model")
    os.rmdir("inside")
    in_place(Path("."))
    assert Path.cwd() == tmp_path / "model" and os.stat(".").st_nlink > 0


def in_child(action: Callable[[], None]) -> int:
    """Run ``action`` in a child process. Return the exit code: 0, or 1 if ``action`` raised an exception."""

    def run() -> None:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def test_a_mount_point(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()

    def mounted() -> None:
        subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
        assert exchange_obstacle(path) == "it is a mount point"
        in_place(path)
        # The folder `outer` contains a mount point, whose files are on another file system, so it cannot be
        # exchanged.
        outer = tmp_path / "outer"
        (outer / "mounted").mkdir(parents=True)
        (outer / "config.json").write_text("old")
        subprocess.run(["mount", "-t", "tmpfs", "none", outer / "mounted"], check=True)
        (outer / "mounted" / "mine").write_text("mine")
        with pytest.raises(OSError, match="a folder with a mount point in it cannot be replaced"):
            fill(outer, config_json="new")
        assert (outer / "config.json").read_text() == "old" and (
            outer / "mounted" / "mine"
        ).read_text() == "mine"

    libc = ctypes.CDLL(None, use_errno=True)

    def unshared() -> None:
        if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
            os._exit(77)
        mounted()

    status = in_child(unshared)
    if status == 77:
        pytest.skip("mounting is not allowed here")
    assert status == 0


def test_a_parent_that_cannot_be_written() -> None:
    def unprivileged(parent: Path) -> None:
        if os.geteuid() == 0:
            os.chown(parent, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        path = parent / "model"
        path.mkdir()
        parent.chmod(0o555)
        assert "Permission denied" in (exchange_obstacle(path) or "")
        in_place(path)
        path.chmod(0o555)
        with pytest.raises(PermissionError):
            fill(path, config_json="refused")
        assert (path / "config.json").read_text() == "new"
        path.chmod(0o755)
        parent.chmod(0o755)

    # Other users may not enter the folders that pytest creates, so this test creates one elsewhere.
    with tempfile.TemporaryDirectory() as parent:
        assert in_child(lambda: unprivileged(Path(parent))) == 0


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="Permission denied"):
        fill(tmp_path / "file", config_json="new")
    assert (tmp_path / "file").read_text() == "mine" and os.listdir(tmp_path) == ["file"]
