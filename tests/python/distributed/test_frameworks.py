"""Test the optimizers, shard and patch under transformers' Trainer, Accelerate, DeepSpeed and Lightning (CPU, Gloo)."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import processes
import shoestring
from processes import launch, whole
from shoestring.distributed import shard
from shoestring.optim import AdamW
from shoestring.optim.sharded import local

LR = 1e-2


@pytest.fixture(scope="module", autouse=True)
def frameworks() -> None:
    processes.preload(
        "transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "lightning.pytorch"
    )


def assert_same(net: nn.Module, expected: dict[str, Tensor], atol: float = 0.0) -> None:
    found = {name.removeprefix("module."): whole(p.detach()) for name, p in net.named_parameters()}
    assert found.keys() == expected.keys()
    for name, p in found.items():
        torch.testing.assert_close(p, expected[name], rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")


def copies(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        local(value).nbytes
        for entry in optimizer.state.values()
        for name, value in entry.items()
        if name != "step"
    )


# ---- the Trainer of transformers ---------------------------------------------------------------------------


def llama() -> nn.Module:
    """Return a patched model. The products are PyTorch's, since measured choices could differ between processes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    net = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None)).train()
    shoestring.patch(net, linear=False)
    return net


def trained(
    folder: Path, is_split: bool, accumulate: int, resume: str | None, options: dict[str, Any]
) -> tuple[nn.Module, AdamW]:
    import transformers

    rows = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=4, seed=3, max_grad_norm=0.5, use_cpu=True,
        gradient_accumulation_steps=accumulate * 2 // ranks, report_to=[], disable_tqdm=True, logging_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    net = llama()
    optimizer = AdamW(net.parameters(), lr=LR, **options)
    if is_split:
        shard(optimizer)
    trainer = transformers.Trainer(
        net, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows], optimizers=(optimizer, None),
        callbacks=[shoestring.callbacks.transformers_callback()] if is_split else [],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel) == (ranks > 1)
    return net, optimizer


def _trains_alone(folder: Path, accumulate: int, resume: str | None, options: dict[str, Any]) -> None:
    net, _ = trained(folder / "alone", False, accumulate, resume, options)
    torch.save(copies(net), folder / "alone.pt")


def _trains(folder: Path, is_split: bool, accumulate: int, options: dict[str, Any]) -> None:
    expected = torch.load(folder / "alone.pt")
    # The sum of two gradients has the same bits in any order. With four, the order changes the last bits, by at most
    # 1e-7 since no gradient exceeds 0.5. With eps=1e-4, a step of Adam then differs by at most LR * 1e-7 / 1e-4.
    atol = 4 * LR * 1e-3 if accumulate > 1 else 0.0
    for resume in (None, folder / "together" / "checkpoint-2"):
        net, optimizer = trained(
            folder / "together", is_split, accumulate, None if resume is None else str(resume), options
        )
        assert_same(net, expected, atol)
        if is_split:
            elements = sum(p.numel() for p in net.parameters())
            assert state_bytes(optimizer) <= 0.51 * elements * (8 if options else 2 + 8 / 256)


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_trainer(is_split: bool, accumulate: int, tmp_path: Path) -> None:
    """Two processes clip, accumulate, save and resume as one does, which also continues their checkpoint."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options = dict(state_format="fp32", eps=1e-4) if accumulate > 1 else {}
    launch(1, _trains_alone, tmp_path, accumulate, None, options)
    launch(2, _trains, tmp_path, is_split, accumulate, options)
    if is_split and accumulate == 1:
        expected = torch.load(tmp_path / "alone.pt")
        launch(1, _trains_alone, tmp_path, 1, str(tmp_path / "together" / "checkpoint-2"), options)
        for name, p in torch.load(tmp_path / "alone.pt").items():
            assert torch.equal(p, expected[name])


def _refuses_to_save(folder: Path) -> None:
    """Train with a split optimizer and without the callback. Rank 0 raises in time, and ends."""
    import transformers

    sys.modules["shoestring.distributed.all_ranks"].SECONDS = 0.5  # type: ignore[attr-defined]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    net = llama()
    optimizer = AdamW(net.parameters(), lr=LR)
    shard(optimizer)
    row = torch.arange(12)
    data = 16 * [{"input_ids": row, "labels": row}]
    trainer = transformers.Trainer(net, arguments, train_dataset=data, optimizers=(optimizer, None))
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    if dist.get_rank() == 0:
        (folder / "error.txt").write_text(str(error.value))
    os._exit(7)


def test_trainer_refuses_to_save_the_state_of_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(torch.multiprocessing.ProcessExitedException):
        launch(2, _refuses_to_save, tmp_path)
    assert (tmp_path / "error.txt").read_text() == (
        "AdamW: state_dict: expected a call on all 2 ranks, each of which has a part of the state; rank 1 has not called "
        "within 0.5 s. Call it on all ranks, or call consolidate_state_dict() on all ranks before. With the Trainer of "
        "transformers, pass callbacks=[shoestring.callbacks.transformers_callback()]"
    )


# ---- Accelerate --------------------------------------------------------------------------------------------


def blocks() -> nn.Module:
    """Return a model of which both halves of each parameter are whole blocks of 256 elements of state."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(256, 128, bias=False), nn.Tanh(), nn.Linear(128, 256, bias=False))


def rows_of(step: int, rank: int) -> Tensor:
    return torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + rank))


def train_alone(clip: float, steps: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights after steps of two micro-batches on each of two ranks, as PyTorch alone trains them."""
    net = blocks()
    optimizer = AdamW(net.parameters(), lr=LR, **options)
    for step in range(steps):
        sums = []
        for rank in range(2):
            net.zero_grad()
            for micro in range(2):
                (net(rows_of(2 * step + micro, rank)).square().mean() / 2).backward()
            sums.append([p.grad for p in net.parameters()])
        for p, a, b in zip(net.parameters(), *sums, strict=True):
            p.grad = (a + b) / 2
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return copies(net)


def accelerator(fsdp: bool) -> Any:
    import accelerate
    from accelerate.state import PartialState

    made = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    if fsdp:
        # Accelerate takes the plugin on GPUs only, although all that it calls works on the CPU.
        kind = accelerate.utils.DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = made.state.distributed_type = kind
        made.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, transformer_cls_names_to_wrap=["Linear"]
        )
    return made


def _accelerates(folder: Path, how: str, clip: float, options: dict[str, Any]) -> None:
    ours = accelerator(fsdp=how == "fsdp2")
    rank = ours.process_index

    def prepared() -> tuple[nn.Module, Any, AdamW]:
        net = blocks()
        optimizer = AdamW(net.parameters(), lr=LR, **options)
        if how == "split":
            shard(optimizer)
        return *ours.prepare(net, optimizer), optimizer

    def train(net: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            for micro in range(2):
                with ours.accumulate(net):
                    ours.backward(net(rows_of(2 * step + micro, rank)).square().mean())
                    if ours.sync_gradients:
                        ours.clip_grad_norm_(net.parameters(), clip)
                    optimizer.step()
                    optimizer.zero_grad()

    net, optimizer, own = prepared()
    assert isinstance(net, nn.parallel.DistributedDataParallel) == (how != "fsdp2")
    train(net, optimizer, range(2))
    ours.save_state(str(folder / "saved"))
    ours.wait_for_everyone()
    # With FSDP2 the norm is a sum over shards, and differs in its last bits. With eps=1e-4 and gradients of at
    # most 0.5, a step then differs by LR * 1e-7 / 1e-4. Without clipping all bits are equal.
    atol = 3 * LR * 1e-3 if how == "fsdp2" and clip < 1 else 0.0
    assert_same(net, train_alone(clip, 2, options), atol)
    for p in net.parameters():
        p.data.zero_()
    train(net, optimizer, range(3))  # the state differs, too
    ours.load_state(str(folder / "saved"))
    train(net, optimizer, range(2, 3))
    assert_same(net, train_alone(clip, 3, options), atol)
    if how != "ddp" and not options:
        elements = sum(p.numel() for p in net.parameters())
        assert state_bytes(own) == elements * (2 + 8 / 256) / 2


@pytest.mark.parametrize("how", ["ddp", "split", "fsdp2"])
@pytest.mark.parametrize("clips", [False, True])
def test_accelerate(how: str, clips: bool, tmp_path: Path) -> None:
    """Accelerate accumulates, clips, saves and loads with the bits of one process."""
    pytest.importorskip("accelerate")
    options = dict(state_format="fp32", eps=1e-4) if clips else {}
    launch(2, _accelerates, tmp_path, how, 0.01 if clips else 1e6, options)


def _refuses(how: str) -> None:
    ours = accelerator(fsdp=how == "shard")
    net = blocks()
    if how == "parallelize":
        shoestring.parallelize(net, "zero1")
    optimizer = AdamW(net.parameters(), lr=LR)
    if how == "shard":
        shard(optimizer)
    net, optimizer = ours.prepare(net, optimizer)
    with pytest.raises(RuntimeError) as error:
        ours.backward(net(rows_of(0, 0)).square().mean())
        optimizer.step()
    assert str(error.value) == {
        "parallelize": "parallelize: model: expected no wrapper, received a model in DistributedDataParallel, which reduces the "
        "gradients a second time. If a trainer wraps the model, as Accelerator.prepare(model) does, leave out "
        "parallelize, and call shoestring.distributed.shard(optimizer) for ZeRO-1",
        "shard": "AdamW: params: expected plain parameters after shard(), received DTensors in their place. Leave out "
        "shard(), since FSDP splits the state",
    }[how]  # fmt: skip


@pytest.mark.parametrize("how", ["parallelize", "shard"])
def test_what_is_split_twice_is_refused(how: str) -> None:
    pytest.importorskip("accelerate")
    launch(2, _refuses, how)


# ---- DeepSpeed ---------------------------------------------------------------------------------------------


class Engine:
    """An engine of DeepSpeed that steps our optimizer, made by DeepSpeed or by Accelerate."""

    def __init__(
        self, stage: int, how: str, dtype: torch.dtype, optimizer: str, options: dict[str, Any]
    ) -> None:
        os.environ.update(DS_ACCELERATOR="cpu", ACCELERATE_USE_DEEPSPEED="true")
        import accelerate
        import deepspeed

        # The operators for shared memory would be compiled here. Without them DeepSpeed communicates by Gloo.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
        net = blocks()
        self.own = getattr(shoestring.optim, optimizer)(net.parameters(), lr=LR, **options)
        config = {
            "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.01,
            "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": dtype == torch.bfloat16},
        }  # fmt: skip
        self.accelerator = None
        if how == "accelerate":
            accelerate.state.AcceleratorState._reset_state()  # the second engine has a plugin of its own
            plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
            self.accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
            self.engine, _ = self.accelerator.prepare(net, self.own)
        else:
            self.engine, *_ = deepspeed.initialize(model=net, optimizer=self.own, config=config)
        self.stage, self.dtype = stage, dtype

    def train(self, steps: range) -> None:
        for step in steps:
            for micro in range(2):
                rows = rows_of(2 * step + micro, dist.get_rank()).to(self.dtype)
                loss = self.engine(rows).float().square().mean()
                if self.accelerator is not None:
                    with self.accelerator.accumulate(self.engine):
                        self.accelerator.backward(loss)
                else:
                    self.engine.backward(loss)
                    self.engine.step()

    def weights(self) -> list[Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        whole = safe_get_full_fp32_param if self.stage > 0 else Tensor.detach
        return [whole(p).clone() for p in self.engine.module.parameters()]


def _deepspeeds(folder: Path, stage: int, how: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    ours = Engine(stage, how, dtype, "AdamW", options)
    ours.train(range(2))
    ours.engine.save_checkpoint(folder, tag="saved")
    ours.train(range(2, 3))
    after = ours.weights()
    if dtype == torch.float32:
        # DeepSpeed clips by a norm with other last bits, and adds gradients in another order: see _accelerates.
        for found, expected in zip(after, train_alone(0.01, 3, options).values(), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=3 * LR * 1e-3)
    elements, parts = sum(p.numel() for p in after), 2 if stage > 0 else 1
    assert state_bytes(ours.own) == elements * (2 + 8 / 256 if dtype == torch.bfloat16 else 8) / parts
    again = Engine(stage, how, dtype, "AdamW", options)
    again.engine.load_checkpoint(folder, tag="saved")
    again.train(range(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(again.weights(), after, strict=True))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["fp32", "bf16", "accelerate"])
@pytest.mark.sample(4)
def test_deepspeed(stage: int, how: str, tmp_path: Path) -> None:
    """DeepSpeed accumulates and clips as one process, saves and resumes, with our state in fp32 and in 8 bits."""
    pytest.importorskip("deepspeed")
    state, dtype = ("8bit", torch.bfloat16) if how == "bf16" else ("fp32", torch.float32)
    launch(2, _deepspeeds, tmp_path, stage, how, dtype, dict(state_format=state, eps=1e-4))


def _refuses_ranges(optimizer: str) -> None:
    ours = Engine(1, "fp32", torch.float32, optimizer, {})
    with pytest.raises(RuntimeError) as error:
        ours.train(range(1))
    assert str(error.value) == (
        f"{optimizer}: params: expected whole parameters, received (32768,) in place of (128, 256), as ZeRO of DeepSpeed "
        "gives. Use its stage 0, fully_shard or shoestring.parallelize, or another optimizer, such as AdamW"
    )


@pytest.mark.parametrize("optimizer", ["LAMB", "Muon"])
def test_deepspeed_splits_no_whole_parameters(optimizer: str) -> None:
    pytest.importorskip("deepspeed")
    launch(2, _refuses_ranges, optimizer)


# ---- Lightning ---------------------------------------------------------------------------------------------


def _lightning(folder: Path, how: str) -> None:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Under FSDP2, Lightning adds the gradients of two ranks before those of two micro-batches, which changes the
    # last bits: see _trains.
    options, atol = (dict(state_format="fp32", eps=1e-4), 3 * LR * 1e-3) if how == "fsdp2" else ({}, 0.0)
    rank = int(os.environ["RANK"])

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = blocks()

        def configure_model(self) -> None:
            if how == "fsdp2":
                for module in (*self.net, self.net):
                    if not isinstance(module, nn.Tanh):
                        torch.distributed.fsdp.fully_shard(module, mesh=self.device_mesh["data_parallel"])

        def training_step(self, _: Tensor, index: int) -> Tensor:
            # A loader without a state begins anew after a resume, while Lightning continues to count.
            return self.net(rows_of(index, rank)).square().mean()

        def configure_optimizers(self) -> AdamW:
            optimizer = AdamW(self.parameters(), lr=LR, **options)
            if how == "split":
                shard(optimizer)
            return optimizer

    def fit(steps: int, resume: str | None) -> Any:
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", devices=2, accumulate_grad_batches=2, logger=False,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if how == "fsdp2" else "ddp",
            gradient_clip_val=None if how == "fsdp2" else 0.01, use_distributed_sampler=False, default_root_dir=folder,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        net = Net()
        loader = torch.utils.data.DataLoader(range(6), batch_size=None)  # type: ignore[arg-type]
        trainer.fit(net, loader, ckpt_path=resume)
        return trainer, net

    clip = 1e6 if how == "fsdp2" else 0.01
    trainer, net = fit(2, None)
    assert_same(net.net, train_alone(clip, 2, options), atol)
    trainer.save_checkpoint(folder / "saved.ckpt")
    trainer, net = fit(3, str(folder / "saved.ckpt"))
    assert_same(net.net, train_alone(clip, 3, options), atol)
    if how != "ddp":
        elements = sum(p.numel() for p in net.parameters())
        assert state_bytes(trainer.optimizers[0]) == elements * (8 if options else 2 + 8 / 256) / 2


@pytest.mark.parametrize("how", ["ddp", "split", "fsdp2"])
def test_lightning(how: str, tmp_path: Path) -> None:
    """Lightning accumulates, clips, saves and resumes as one process does, without FSDP2 with its bits."""
    pytest.importorskip("lightning")
    launch(2, _lightning, tmp_path, how)
