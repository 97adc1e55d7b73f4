"""Linear layers of a patched model compose: parallel training, checkpoints, offload, hooks, torch.compile."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

import shoestring
from linear_calls import Calls, choose_ours
from processes import run, whole
from relative_error import relative_error
from tiny_decoder import build_decoder


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_ours(monkeypatch)


def loss_of(model: Any, rank: int = 0) -> Tensor:
    ids = torch.arange(66).add(7 * rank).remainder(97).view(2, 33)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def backward(model: Any, rank: int = 0) -> dict[str, Tensor]:
    """Take two backward passes, and return the loss and the gradients by the names of the parameters."""
    for _ in range(2):  # the second one tests that hooks and shards still work after a backward pass
        model.zero_grad()
        loss = loss_of(model, rank)
        loss.backward()
    found = {"loss": loss.detach()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[name.removeprefix("module.")] = whole(p.grad)
    return found


def assert_alike(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert ours.keys() == expected.keys() and len(ours) > 1
    for name, gradient in expected.items():
        assert ours[name].dtype == gradient.dtype
        assert relative_error(ours[name], gradient) <= tolerance, name


def calls(model: Any, rank: int = 0) -> int:
    with Calls() as counted:
        loss_of(model, rank)
    return counted.linear + counted.group


def _parallel(rank: int) -> None:
    for kind in ("ddp", "ddp autocast", "fsdp2", "fsdp2 bf16", "tensor parallel"):
        narrow = kind in ("ddp autocast", "fsdp2 bf16")
        shard = 0 if kind == "tensor parallel" else rank
        results = []
        for patched in (False, True):
            model = build_decoder()
            with pytest.MonkeyPatch.context() as monkeypatch:
                choose_ours(monkeypatch)
                report = shoestring.patch(model, linear=patched)
            net = _wrapped(model, kind)
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "ddp autocast"):
                results.append(backward(net, shard))
                # Tensor parallelism hooks its layers, so they are called as usual.
                assert calls(net, shard) == (8 if patched and kind != "tensor parallel" else 0), kind
            if kind.startswith("ddp"):
                report.undo()
        assert_alike(results[1], results[0], 5e-2 if narrow else 2e-5)


def _wrapped(model: Any, kind: str) -> Any:
    if kind.startswith("ddp"):
        return DistributedDataParallel(model)
    if kind.startswith("fsdp2"):
        bf16 = {"param_dtype": torch.bfloat16} if kind == "fsdp2 bf16" else {}
        for layer in (*model.model.layers, model):
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(**bf16))
        return model
    columns = [*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (2,)), plan)
    return model


def test_two_processes(tmp_path: Path) -> None:
    """DDP, FSDP2 and tensor parallelism, also in bf16, give the gradients of a model with PyTorch's layers."""
    run(2, tmp_path, _parallel)


def pair() -> tuple[Any, Any, shoestring.PatchReport]:
    """Return a model with only its loss patched, one with linear layers as well, and the report."""
    plain, patched = build_decoder(), build_decoder()
    shoestring.patch(plain, linear=False)
    return plain, patched, shoestring.patch(patched, linear=True)


@pytest.mark.parametrize("keep", [(), ("products",)], ids=str)
def test_checkpoint_model(keep: tuple[str, ...]) -> None:
    plain, patched, _ = pair()
    expected, own = backward(plain), backward(patched)
    blocks = [type(patched.model.layers[0])]
    shoestring.checkpoint_model(patched, blocks, keep=keep)
    ours = backward(patched)
    assert all(torch.equal(ours[name], own[name]) for name in own)
    assert_alike(ours, expected)


def test_offloaded_activations() -> None:
    _, patched, _ = pair()
    own = backward(patched)
    offload = shoestring.offload_activations(exclude=list(patched.parameters()), folder=None)
    with offload:
        ours = backward(patched)
    assert all(torch.equal(ours[name], own[name]) for name in own)


def _forward_hook(layer: nn.Module, seen: list[str]) -> None:
    layer.register_forward_hook(lambda *_: seen.append("hook"))


def _forward_pre_hook(layer: nn.Module, seen: list[str]) -> None:
    layer.register_forward_pre_hook(lambda *_: seen.append("hook"))


def _backward_hook(layer: nn.Module, seen: list[str]) -> None:
    layer.register_full_backward_hook(lambda *_: seen.append("hook"))


def _backward_pre_hook(layer: nn.Module, seen: list[str]) -> None:
    layer.register_full_backward_pre_hook(lambda *_: seen.append("hook"))


def _own_forward(layer: Any, seen: list[str]) -> None:
    original = layer.forward

    def forward(x: Tensor) -> Tensor:
        seen.append("hook")
        result: Tensor = original(x)
        return result

    layer.forward = forward


def _weight_hook(layer: Any, seen: list[str]) -> None:
    layer.weight.register_hook(lambda _: seen.append("hook"))


def _accumulation_hook(layer: Any, seen: list[str]) -> None:
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append("hook"))


class Doubled(nn.Module):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, weight: Tensor) -> Tensor:
        self.seen.append("hook")
        return 2 * weight


def _parametrization(layer: nn.Module, seen: list[str]) -> None:
    parametrize.register_parametrization(layer, "weight", Doubled(seen))


def _weight_norm(layer: nn.Module, seen: list[str]) -> None:
    parametrizations.weight_norm(layer)
    seen.append("no hook")


def _old_weight_norm(layer: nn.Module, seen: list[str]) -> None:
    torch.nn.utils.weight_norm(layer)
    seen.append("no hook")


def _pruning(layer: nn.Module, seen: list[str]) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.5)
    seen.append("no hook")


CHANGES = [_forward_hook, _forward_pre_hook, _backward_hook, _backward_pre_hook, _own_forward, _weight_hook,
           _accumulation_hook, _parametrization, _weight_norm, _old_weight_norm, _pruning]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("first", [True, False], ids=["patched first", "changed first"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
@pytest.mark.parametrize("where", ["self_attn.k_proj", "mlp.down_proj"])
def test_hooks_and_changed_weights(
    where: str, change: Callable[[nn.Module, list[str]], None], first: bool
) -> None:
    """A layer with hooks or a computed weight is called as usual, alone and within a group."""
    plain, patched = build_decoder(), build_decoder()
    shoestring.patch(plain, linear=False)
    seen: dict[str, list[str]] = {"plain": [], "patched": []}
    if first:
        shoestring.patch(patched, linear=True)
    for name, model in (("plain", plain), ("patched", patched)):
        change(model.model.layers[0].get_submodule(where), seen[name])
    if not first:
        seen["patched"].clear()
        seen["plain"].clear()
        shoestring.patch(patched, linear=True)
        seen["patched"].clear()
    assert_alike(backward(patched), backward(plain))
    assert seen["patched"] == seen["plain"] and (not first or seen["plain"])


def test_hooks_of_all_modules() -> None:
    plain, patched, _ = pair()
    seen: list[str] = []
    handle = register_module_forward_hook(
        lambda module, *_: seen.append("linear") if type(module) is nn.Linear else None
    )
    try:
        assert calls(patched) == 0
        ours = len(seen)
        loss_of(plain)
        assert ours == len(seen) - ours == 2 * 7
    finally:
        handle.remove()
    assert calls(patched) == 8


def test_shared_layers_and_weights() -> None:
    models = build_decoder(), build_decoder()
    for model in models:
        first, second = model.model.layers
        second.mlp.down_proj = first.mlp.down_proj  # one layer in two modules
        second.self_attn.q_proj.weight = first.self_attn.q_proj.weight  # one weight in two layers
        first.self_attn.v_proj.weight = first.self_attn.k_proj.weight  # one weight twice in a group
    plain, patched = models
    shoestring.patch(plain, linear=False)
    report = shoestring.patch(patched, linear=True)
    assert calls(patched) == 8
    assert_alike(backward(patched), backward(plain))
    report.undo()


def test_weights_that_change_their_kind() -> None:
    """A frozen weight gets no gradient; weights of another device or dtype are left to PyTorch."""
    plain, patched, report = pair()
    for model in (plain, patched):
        model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
        model.model.layers[1].mlp.down_proj.weight.requires_grad_(False)
    assert_alike(backward(patched), backward(plain))
    assert calls(patched.double()) == 0
    assert_alike(backward(patched), backward(plain.double()), 1e-12)
    layer = copy.deepcopy(patched.model.layers[0].mlp).float()
    patched.model.layers[0].mlp.to("meta")
    x = torch.randn(1, 40, 64)
    assert patched.model.layers[0].mlp(x.double().to("meta")).shape == layer(x).shape
    report.undo()


def test_undo_restores_everything() -> None:
    model = build_decoder()
    before = {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()}
    names = list(model.state_dict())
    expected = backward(model)
    model.zero_grad()
    report = shoestring.patch(model, linear=True)
    assert list(model.state_dict()) == names and list(dict(model.named_parameters())) == names
    backward(model)
    model.zero_grad()
    report.undo()
    for name, module in model.named_modules():
        kind, attributes = before[name]
        assert type(module) is kind and module.__dict__.keys() == attributes.keys(), name
    assert all(torch.equal(a, b) for a, b in zip(backward(model).values(), expected.values(), strict=True))


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    """torch.compile captures a step whole, and Inductor's kernels give the same gradients."""
    model = build_decoder(num_hidden_layers=1)
    shoestring.patch(model, linear=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = backward(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        model.zero_grad()
        loss = loss_of(compiled)
        loss.backward()
    ours = {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}
    assert_alike(ours, expected, 5e-2)
