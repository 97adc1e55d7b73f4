"""Tests of ScheduleFreeAdamW on two processes: train and eval modes, and state in checkpoints."""

from pathlib import Path

import pytest
import torch
from test_optimizer_distributed import model, run, train, whole
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from shoestring.optim import ScheduleFreeAdamW


def _modes(rank: int, state: str) -> None:
    sharded, plain = fully_shard(model()), model()
    opts = [
        ScheduleFreeAdamW(net.parameters(), 1e-2, state_format=state, max_grad_norm=0.5)
        for net in (sharded, plain)
    ]
    for net, opt in zip((sharded, plain), opts, strict=True):
        train(net, opt, range(4))
        opt.eval()
    # Sharding moves the boundaries of quantisation blocks, so scales and random bits differ from those on one
    # process.
    atol = 1e-6 if state == "fp32" else 2e-3
    for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q, rtol=0, atol=atol)
    again = fully_shard(model())
    other = ScheduleFreeAdamW(again.parameters(), state_format=state)
    set_model_state_dict(again, get_model_state_dict(sharded))
    set_optimizer_state_dict(again, other, get_optimizer_state_dict(sharded, opts[0]))
    alone = model()
    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(alone, get_model_state_dict(sharded, options=full))
    third = ScheduleFreeAdamW(alone.parameters(), state_format=state)
    set_optimizer_state_dict(
        alone, third, get_optimizer_state_dict(sharded, opts[0], options=full), options=full
    )
    for net, opt in ((sharded, opts[0]), (again, other), (alone, third)):
        assert not opt.param_groups[0]["train_mode"]
        opt.max_grad_norm = 0.5
        opt.train()
        train(net, opt, range(4, 6))
        opt.eval()
    for p, q, r in zip(sharded.parameters(), again.parameters(), alone.parameters(), strict=True):
        assert torch.equal(whole(p), whole(q))
        torch.testing.assert_close(whole(p), r, rtol=0, atol=atol)


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit", "4bit"])
def test_modes_over_shards(state: str, tmp_path: Path) -> None:
    run(2, tmp_path, _modes, state)
