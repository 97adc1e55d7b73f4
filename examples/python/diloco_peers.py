"""Train a small language model in processes that come and go, which average their weights by DiLoCo.

    python examples/python/diloco_peers.py --serve 29400            # the list of the processes; it trains nothing
    python examples/python/diloco_peers.py --join localhost:29400   # a process that trains: start several

Kill processes and start others, on any machines, while the training goes on. PyTorch's elastic rendezvous, which torchrun
uses as well, agrees on the processes that take part.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from common import Parser, count, sequences
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)
from train import Model

import shoestring
from shoestring.distributed import DiLoCo, mean_over_ranks


def rendezvous_at(address: str, least: int) -> DynamicRendezvousHandler:
    """Return PyTorch's rendezvous over the store at an address, for ``least`` processes or more."""
    # Each rendezvous has a store of its own then, also for processes that have missed the first one.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # The processes that come in the second after the first `least` take part. A process without a sign of life for
    # three seconds has ended.
    parameters = RendezvousParameters(
        "c10d",
        address,
        "diloco",
        least,
        1000,
        is_host=False,
        last_call_timeout=1,
        keep_alive_interval=1,
        keep_alive_max_attempt=3,
    )
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


def connect(rendezvous: DynamicRendezvousHandler) -> None:
    """Make the group of all processes that come to the next rendezvous."""
    if dist.is_initialized():
        dist.destroy_process_group()
    found = rendezvous.next_rendezvous()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", found.store),
        rank=found.rank,
        world_size=found.world_size,
        timeout=timedelta(seconds=60),
    )
    print(f"rank {found.rank} of {found.world_size} processes", flush=True)


def train(rendezvous: DynamicRendezvousHandler, steps: int) -> None:
    """Train until ``steps``, with the processes of each average."""
    connect(rendezvous)
    torch.manual_seed(os.getpid())  # each process has its own data
    model = Model()
    optimizer = shoestring.optim.AdamW(model.parameters(), lr=3e-3)
    diloco = DiLoCo(optimizer, every=20, compress="8bit", fragments=2, overlap=2)
    print(f"joins at step {diloco.steps}", flush=True)
    while diloco.steps < steps:
        tokens = sequences(rows=16, length=33)
        loss = shoestring.linear_cross_entropy(model(tokens[:, :-1]), model.head.weight, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            changes = False
            if diloco.step():
                # All processes learn in the same step whether others wait to join.
                waiting = torch.tensor(float(rendezvous.num_nodes_waiting()))
                changes = mean_over_ranks(waiting).item() > 0
                print(f"step {diloco.steps}: loss {loss.item():.3f}", flush=True)
        except RuntimeError as error:
            changes = True  # a process has ended; the weights are as they were
            print(str(error).splitlines()[0], flush=True)
        if changes:
            connect(rendezvous)
            diloco.regroup()
    diloco.average()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    made = Parser(description="Trains in processes that come and go.")
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--serve", type=int, metavar="PORT", help="hold the list of processes at this port")
    what.add_argument("--join", metavar="HOST:PORT", help="train with the processes of this list")
    made.add_argument("--steps", type=count, default=2000, help="number of optimizer steps")
    made.add_argument("--at-least", type=count, default=2, help="number of processes to wait for")
    options = made.parse_args(arguments)
    if options.join is not None:
        train(rendezvous_at(options.join, options.at_least), options.steps)
        return
    store = dist.TCPStore("0.0.0.0", options.serve, is_master=True, wait_for_workers=False)
    print(f"serves at port {store.port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
