"""With offload="nvme:DIR" on a disk that is too small, the constructor raises a one-line error."""

import copy
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from offload_faults import disturb_offload
from shoestring.optim import AdamW


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB for the test, and yield its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "shoestring", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a file system of 4 MiB")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def optimizer(sizes: list[int], folder: Path) -> AdamW:
    groups = [{"params": [nn.Parameter(torch.zeros(size))]} for size in sizes]
    frozen = nn.Parameter(torch.zeros(1 << 20), requires_grad=False)
    return AdamW([*groups, {"params": [frozen]}], state_format="fp32", offload=f"nvme:{folder}")


@pytest.mark.parametrize("reserves", [True, False], ids=["fallocate", "zeros"])
def test_room_is_made_first(small_disk: Path, reserves: bool) -> None:
    """An optimizer's constructor reserves all disk space that its offloaded state needs later.

    The state takes 8 bytes per trained parameter. Space is reserved in units of 1024 blocks of 256
    parameters.
    """
    disturb_offload(reserves=reserves)
    try:
        with pytest.raises(RuntimeError) as error:
            optimizer([300_000, 300_000], small_disk)
        needed = 2 * 2 * 1024 * 256 * 8
        message = f"expected room for {needed} bytes on the disk, received {4 << 20} free: free some space or choose"
        assert f"AdamW: offload: {small_disk}: {message}" in str(error.value).splitlines()[0]
        opt = optimizer([200_000, 200_000], small_disk)
        free = os.statvfs(small_disk).f_bavail
        assert free == 0
        for group in opt.param_groups[:2]:
            group["params"][0].grad = torch.ones(200_000)
        opt.step()
        with pytest.raises(
            RuntimeError, match="expected room for 2097152 bytes on the disk, received 0 free"
        ):
            opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        assert len(opt.param_groups) == 3
        opt.step()
        saved = copy.deepcopy(opt.state_dict())
        opt.load_state_dict(saved)
        opt.step()
        assert all(opt.state[group["params"][0]]["step"] == 3 for group in opt.param_groups[:2])
    finally:
        disturb_offload()


LIMITED = """
import resource, sys, torch
from shoestring.optim import AdamW
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    AdamW([torch.nn.Parameter(torch.zeros(300_000))], state_format="fp32", offload=f"nvme:{sys.argv[1]}")
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


def test_a_limit_of_the_size_of_files_is_said(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    message = f"AdamW: offload: {tmp_path}: expected room for a file of 4194304 bytes, received a lower limit"
    assert done.stdout.startswith(message)
