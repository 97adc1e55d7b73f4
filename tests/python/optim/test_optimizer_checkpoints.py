"""Tests of AdamW's full state dicts, and of distributed checkpoints that other numbers of processes load."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from processes import batch, model, run, train, whole
from shoestring.optim import APOLLO, CAME, Adafactor, AdamW, GaLore

# Largest change of a moment when it is quantised again with other block boundaries, relative to the largest
# moment. For 8 bits, it is half the widest gap between two codes. For 4 bits, moments with the sign opposite
# to that of the largest moment are clipped at 0.63 times its magnitude.
GAP = {"8bit": 0.008, "4bit": 0.38}


def _moments(opt: AdamW) -> list[Tensor]:
    """Return both moments of every parameter, unsharded and dequantised to fp32."""
    found = []
    for entry in opt.torch_state_dict()["state"].values():
        found += [whole(entry[name]) for name in ("exp_avg", "exp_avg_sq")]
    return found


def _save(rank: int, folder: str, options: dict[str, Any], named: bool) -> None:
    net = fully_shard(model(torch.bfloat16))
    opt = AdamW(net.parameters(), **options)
    train(net, opt, range(3), lambda step: batch(step, torch.bfloat16))
    state = get_optimizer_state_dict(net, opt) if named else opt.state_dict()
    for key, entry in state["state"].items():
        assert all(isinstance(v, DTensor) for name, v in entry.items() if name != "step"), key
    dcp.save({"net": get_model_state_dict(net), "opt": state}, checkpoint_id=folder)
    moments = _moments(opt)
    local = {i: {k: v.clone() for k, v in e.items()} for i, e in enumerate(opt.state.values())}
    train(net, opt, range(3, 5), lambda step: batch(step, torch.bfloat16))
    after = [whole(p).detach() for p in net.parameters()]
    if rank == 0:
        torch.save((moments, after), f"{folder}.pt")
    torch.save(local, f"{folder}.{rank}.pt")


def _load(rank: int, folder: str, options: dict[str, Any], named: bool) -> None:
    net = fully_shard(model(torch.bfloat16))
    opt = AdamW(net.parameters(), **options)
    if not named:
        train(net, opt, range(1), lambda step: batch(step, torch.bfloat16))
    state = {"net": get_model_state_dict(net)}
    state["opt"] = get_optimizer_state_dict(net, opt) if named else opt.state_dict()
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(net, state["net"])
    if named:
        set_optimizer_state_dict(net, opt, state["opt"])
    else:
        opt.load_state_dict(state["opt"])
    moments, after = torch.load(f"{folder}.pt")
    if dist.get_world_size() == 2:
        for entry, old in zip(opt.state.values(), torch.load(f"{folder}.{rank}.pt").values(), strict=True):
            assert entry.keys() == old.keys() and all(torch.equal(entry[k], old[k]) for k in old)
    for i, (a, b) in enumerate(zip(_moments(opt), moments, strict=True)):
        # The shards of the first weight are whole quantisation blocks, so its two moments (indices 0 and 1)
        # are not quantised again.
        if i < 2 or options["state_format"] not in GAP:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=GAP[options["state_format"]] * b.abs().max().item())
    assert all(entry["step"] == 3 for entry in opt.state.values())
    train(net, opt, range(3, 5), lambda step: batch(step, torch.bfloat16))
    for p, q in zip(net.parameters(), after, strict=True):
        if dist.get_world_size() == 2:
            assert torch.equal(whole(p), q)
        torch.testing.assert_close(whole(p), q, rtol=0.02, atol=4e-3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(state_format="8bit", weight_rounding="remainder"), True),
        (dict(state_format="8bit"), False),
        (dict(state_format="4bit"), True),
        (dict(state_format="bf16", weight_rounding="stochastic"), True),
        (dict(state_format="fp32", weight_rounding="remainder"), True),
    ],
)
@pytest.mark.sample(3)
def test_checkpoints_of_two_processes(options: dict, named: bool, tmp_path: Path) -> None:
    run(2, tmp_path, _save, str(tmp_path / "saved"), options, named)
    for world in (2, 1, 3, 4) if named and options["state_format"] == "8bit" else (2, 4):
        run(world, tmp_path, _load, str(tmp_path / "saved"), options, named)


def _whole_states(rank: int, kind: str) -> None:
    net, plain = fully_shard(model()), model()
    opt, other = AdamW(net.parameters(), state_format=kind), AdamW(plain.parameters(), state_format=kind)
    train(net, opt, range(3))
    full = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(net, opt, options=full)
    # The full state dict of a sharded optimizer loads into an optimizer of plain parameters.
    set_optimizer_state_dict(plain, other, state, options=full)
    for a, b in zip(_moments(other), _moments(opt), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=GAP[kind] * b.abs().max().item())
    train(plain, other, range(3, 5))

    again = fully_shard(model())
    # Full state dicts, from plain or sharded parameters, load into an optimizer of sharded parameters.
    for load in ("plain", "direct", "broadcast"):
        third, source = AdamW(again.parameters(), state_format=kind), opt if load == "broadcast" else other
        if load == "direct":
            third.load_state_dict(other.state_dict())
        elif load == "plain":
            set_optimizer_state_dict(again, third, get_optimizer_state_dict(plain, other), options=full)
        else:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_optimizer_state_dict(again, third, state if rank == 0 else {}, options=options)
        for i, (a, b) in enumerate(zip(_moments(third), _moments(source), strict=True)):
            torch.testing.assert_close(a, b, rtol=0, atol=0 if i < 2 else GAP[kind] * b.abs().max().item())
        assert all(entry["step"] == (3 if load == "broadcast" else 5) for entry in third.state.values())

    # torch.optim.AdamW loads the moments from torch_state_dict() as fp32 DTensors.
    theirs = torch.optim.AdamW(again.parameters())
    theirs.load_state_dict(third.torch_state_dict())
    train(again, theirs, range(1))
    fourth = AdamW(again.parameters(), state_format=kind)
    fourth.load_state_dict(theirs.state_dict())
    for i, a in enumerate(_moments(fourth)):
        b = theirs.state[[*again.parameters()][i // 2]][("exp_avg", "exp_avg_sq")[i % 2]].full_tensor()
        torch.testing.assert_close(a, b, rtol=0, atol=GAP[kind] * b.abs().max().item())


@pytest.mark.parametrize("state", ["8bit", "4bit"])
def test_whole_state_dicts_and_those_of_torch(state: str, tmp_path: Path) -> None:
    run(2, tmp_path, _whole_states, state)


WHOLE: dict[str, Any] = dict(
    adafactor=(Adafactor, dict(beta1=0.9)),
    came=(CAME, {}),
    galore=(GaLore, dict(rank=2, update_proj_gap=2, eps=0.1)),
    apollo=(APOLLO, dict(rank=2, update_proj_gap=2)),
)


def _whole(name: str, sharded: bool) -> tuple[torch.nn.Module, Any]:
    net = model()
    kind, options = WHOLE[name]
    return net, kind((fully_shard(net) if sharded else net).parameters(), state_format="fp32", **options)


def _whole_entries(opt: Any) -> list[dict[str, Tensor]]:
    entries = [entry for _, entry in sorted(opt.state_dict()["state"].items())]
    return [{k: whole(torch.as_tensor(v)).clone() for k, v in entry.items()} for entry in entries]


def _save_whole(rank: int, folder: str, name: str) -> None:
    net, opt = _whole(name, sharded=True)
    train(net, opt, range(3))
    state = get_optimizer_state_dict(net, opt)
    dcp.save({"net": get_model_state_dict(net), "opt": state}, checkpoint_id=folder)
    entries = _whole_entries(opt)
    if rank == 0:
        torch.save(entries, f"{folder}.pt")
    if "row_var" in opt.state[net[0].weight]:  # as in the whole matrix
        assert opt.state[net[0].weight]["row_var"].shape == (64, 1)


def _load_whole(rank: int, folder: str, name: str, sharded: bool) -> None:
    net, opt = _whole(name, sharded)
    state = {"net": get_model_state_dict(net), "opt": get_optimizer_state_dict(net, opt)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(net, state["net"])
    set_optimizer_state_dict(net, opt, state["opt"])
    for loaded, saved in zip(_whole_entries(opt), torch.load(f"{folder}.pt"), strict=True):
        assert loaded.keys() == saved.keys() and all(torch.equal(loaded[k], saved[k]) for k in saved)
    plain, other = _whole(name, sharded=False)
    train(plain, other, range(5))
    train(net, opt, range(3, 5))
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        # Sums over rows and columns are those of one process in another order.
        torch.testing.assert_close(whole(p), q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "writers"), list(zip(WHOLE, (2, 3, 4, 2), strict=True)))
@pytest.mark.sample(2)
def test_checkpoints_of_rules_for_whole_matrices(name: str, writers: int, tmp_path: Path) -> None:
    """Any number of processes loads the same state, with or without DTensors."""
    run(writers, tmp_path, _save_whole, str(tmp_path / "saved"), name)
    for world, sharded in ((2, True), (1, True), (3, True), (4, True), (1, False)):
        run(world, tmp_path, _load_whole, str(tmp_path / "saved"), name, sharded)


def _refused(rank: int) -> None:
    net = fully_shard(model())
    opt = AdamW(net.parameters())
    train(net, opt, range(1))
    state = opt.state_dict()
    state["state"][0] = state["state"][0] | {"exp_avg_scale": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"exp_avg_scale: expected \(64, 1\) or \(64,\), received \(5,\)"):
        opt.load_state_dict(state)
    train(net, opt, range(1))


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    run(1, tmp_path, _refused)
