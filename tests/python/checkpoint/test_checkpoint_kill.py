"""Killing a process at any moment, mostly while it writes a checkpoint, loses no complete checkpoint."""

import multiprocessing
import os
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn

from shoestring.files.atomic import remove_partial
from shoestring.optim import AdamW
from shoestring.training.run.checkpoint import checkpoints, load_checkpoint, save_checkpoint

KILLS = 15
# The longest time in seconds from a process's first checkpoint until the test kills it. In this time the
# process writes several checkpoints.
LONGEST = 0.15


class Run:
    """Two bf16 layers and an AdamW optimizer for them; their gradients depend only on the step."""

    def __init__(self, weights: str) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 300)).bfloat16()
        self.optimizer = AdamW(self.model.parameters(), weight_rounding=weights, seed=5)
        self.step = 0

    def train(self, until: int) -> None:
        while self.step < until:
            generator = torch.Generator().manual_seed(self.step)
            for p in self.model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            self.optimizer.step()
            self.step += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        state = {f"{i}.{k}": v for i, e in self.optimizer.state_dict()["state"].items() for k, v in e.items()}
        return {**self.model.state_dict(), **state}


def train(folder: Path, weights: str, said: Connection) -> None:
    """In a separate process, train from the newest checkpoint on, and report each complete checkpoint."""
    torch.set_num_threads(1)
    run = Run(weights)
    remove_partial(folder / "checkpoints")
    if found := checkpoints(folder):
        run.step = load_checkpoint(found[-1], run.model, [run.optimizer])["step"]
    while True:
        run.train(run.step + 1)
        save_checkpoint(folder, run.step, run.model, [run.optimizer], {})
        said.send(run.step)


@pytest.mark.parametrize("weights", ["stochastic", "remainder"])
def test_a_kill_loses_no_checkpoint(tmp_path: Path, weights: str, seed: int) -> None:
    delays = random.Random(seed)
    # The fork server imports all packages once for all processes. Among them is torch._dynamo, which the
    # first optimizer would import, and which is slow.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "shoestring.optim", "shoestring.training.run.checkpoint", "pytest"]
    )
    straight, interrupted = Run(weights), 0
    for _ in range(KILLS):
        heard, said = context.Pipe(duplex=False)
        process = context.Process(target=train, args=(tmp_path, weights, said))
        process.start()
        said.close()
        complete = heard.recv()
        process.join(delays.uniform(0, LONGEST))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        try:
            while True:
                complete = heard.recv()
        except EOFError:
            heard.close()
        interrupted += bool(list((tmp_path / "checkpoints").glob("*.partial")))
        resumed = Run(weights)
        resumed.step = load_checkpoint(checkpoints(tmp_path)[-1], resumed.model, [resumed.optimizer])["step"]
        assert complete <= resumed.step <= complete + 1
        straight.train(resumed.step)
        for (name, a), b in zip(straight.tensors().items(), resumed.tensors().values(), strict=True):
            assert torch.equal(a, b), name
    print(f"{interrupted} of {KILLS} kills came while a checkpoint was written, {straight.step} steps")
    assert interrupted >= KILLS // 5
