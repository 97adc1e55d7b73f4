"""Test weights and state of several processes that lie in a file or in host memory (CPU, Gloo)."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoestring
from processes import run
from shoestring.distributed.groups import plain_tensors
from shoestring.optim import LAMB, SGD, AdamW, ScheduleFreeAdamW
from shoestring.optim.sharded import local
from split_models import adapted, model


def in_file(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor is a file that has no name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return "/shoestring-swap-" in line and line.endswith("(deleted)")
    return False


def _offloads(rank: int, strategy: str, options: dict[str, Any], quantize: str | None, folder: str) -> None:
    """Compare training, files and whole weights bit for bit with those of weights in memory."""
    mesh = (2, dist.get_world_size() // 2) if strategy == "hsdp" else None
    found = []
    for place in (None, folder):
        net = adapted(quantize) if quantize else model(torch.bfloat16)
        report = shoestring.parallelize(net, strategy, mesh=mesh, offload=place)
        more = {} if place is None else options
        opt = AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, **more)
        for step in range(3):
            x = torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + rank))
            net(x.to(torch.float32 if quantize else torch.bfloat16)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        parts = [t for p in net.parameters() for _, t in plain_tensors("", local(p))]
        assert [in_file(t) for t in parts] == len(parts) * [place is not None]
        file = Path(folder.removeprefix("nvme:")) / f"{place is None}.safetensors"
        shoestring.save_training(file, net, opt)
        dist.barrier()  # rank 0 writes the file
        report.undo()
        whole_parts = [t.clone() for p in net.parameters() for _, t in plain_tensors("", p)]
        assert place is None or f"a file in {file.parent}" in str(report)
        found.append((whole_parts, file.read_bytes()))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(("strategy", "ranks"), [("zero3", 1), ("zero3", 2), ("zero3", 3), ("hsdp", 4)])
@pytest.mark.parametrize("options", [{}, {"step_in_backward": True}, {"offload": "nvme:."}])
@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.sample(4)
def test_weights_in_a_file_train_alike(
    strategy: str, ranks: int, options: dict[str, Any], quantize: str | None, tmp_path: Path
) -> None:
    ranks = 2 if quantize and ranks == 3 else ranks
    run(ranks, tmp_path, _offloads, strategy, options, quantize, f"nvme:{tmp_path}")


def _offloads_state(
    rank: int, strategy: str, make: Any, place: str, shape: tuple[int, int], home: str
) -> None:
    """Compare steps, whole state and files bit for bit with those of state in memory, also after a resume."""
    folder, found = Path(home), []
    for offload in (None, place):
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(*shape, bias=False), nn.Linear(shape[1], 5, bias=False)).bfloat16()
        report = shoestring.parallelize(net, strategy)
        opt = make(net.parameters(), offload=offload)
        for step in range(4):
            if step == 2:
                state = copy.deepcopy(opt.state_dict())
                opt = make(net.parameters(), offload=offload)
                report._optimizers[:] = [opt]
                opt.load_state_dict(state)
            x = torch.randn(4, shape[0], generator=torch.Generator().manual_seed(10 * step + rank))
            if isinstance(opt, ScheduleFreeAdamW):
                opt.train()
            net(x.bfloat16()).square().mean().backward()
            opt.step()
            opt.zero_grad()
        if isinstance(opt, ScheduleFreeAdamW):
            opt.eval()
        own = [t for p in net.parameters() for name, t in opt.state.get(p, {}).items() if name != "step"]
        assert not place.startswith("nvme:") or offload is None or not own or any(map(in_file, own))
        path = folder / f"{strategy}{offload is None}.safetensors"
        shoestring.optim.save_optimizer(opt, path)
        dist.barrier()  # rank 0 writes the file
        found.append(([p.detach().clone() for p in net.parameters()], path.read_bytes()))
        report.undo()
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("place", ["nvme", "stream"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (partial(AdamW, max_grad_norm=1.0), (70, 301)),
        (partial(AdamW, weight_rounding="remainder", state_format="4bit"), (70, 301)),
        (AdamW, (2501, 4001)),  # the part of a process has several chunks
        (ScheduleFreeAdamW, (70, 301)),
        (LAMB, (70, 301)),
        (partial(SGD, lr=1e-2, momentum=0.9), (1, 3)),  # a part of one process has no elements
    ],
)
@pytest.mark.sample(6)
def test_state_of_a_part_is_offloaded(
    strategy: str, ranks: int, place: str, make: Any, shape: tuple[int, int], tmp_path: Path
) -> None:
    run(
        ranks,
        tmp_path,
        _offloads_state,
        strategy,
        make,
        f"nvme:{tmp_path}" if place == "nvme" else place,
        shape,
        str(tmp_path),
    )
