"""Training steps on a fake CUDA device: shapes, dtypes and devices of every operator, and no synchronisation.

A step runs on fake CUDA tensors and on real CPU tensors. Both must call the same operators, which return the
same shapes and dtypes. The tests need no GPU and no CUDA kernels, so they say nothing about values, nor about
the host code of CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

import emulator_cases
import shoestring
from fake_device import Recorder, fake_cuda, run_backward, walked_backward  # noqa: F401  (a fixture)
from shoestring import optim

transformers = pytest.importorskip("transformers")

VOCAB = 61


def llama(adapter: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """Return a small Llama, dense or with LoRA adapters, over weights that ``adapter`` may quantise."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    if adapter is not None:
        quantize = None if adapter == "lora" else adapter
        shoestring.lora.apply(model, rank=4, alpha=8, quantize=quantize, double_quant=adapter == "nf4")
    return model


@dataclass(frozen=True)
class Case:
    """A training run: the model's adapter and dtype, the optimizer, and what happens in a step."""

    optimizer: type[torch.optim.Optimizer] = optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    dtype: torch.dtype = torch.float32
    checkpoint: bool = False
    accumulate: bool = False
    scaled: bool = False

    def model(self) -> nn.Module:
        model = llama(self.adapter, self.dtype)
        # On a GPU, linear layers and embeddings are PyTorch's; on the CPU they would be this package's.
        shoestring.patch(model, linear=False, embedding=False)
        if self.checkpoint:
            shoestring.checkpoint_model(model)
        return model

    def train(self, model: nn.Module, ids: Tensor) -> None:
        """Take two steps, since the first step also allocates the optimizer's state."""
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = self.optimizer(trained, lr=1e-3, **self.options)
        inputs = dict(input_ids=ids, labels=ids)
        if self.checkpoint:
            # A model under a checkpoint must not use a cache. Without a cache and without a mask of four
            # dimensions, transformers reads position_ids on the host.
            mask = torch.ones(*ids.shape, ids.shape[1], dtype=torch.bool, device=ids.device).tril()
            inputs |= dict(use_cache=False, attention_mask=mask[:, None])
        for _ in range(2):
            if self.accumulate:
                with optimizer.accumulate():
                    model(**inputs).loss.backward()
            model(**inputs).loss.backward()
            if self.scaled:
                optimizer.grad_scale = torch.full((), 8.0, device=ids.device)
                optimizer.found_inf = torch.zeros((), device=ids.device)
            optimizer.step()
            optimizer.zero_grad()


LORA: dict[str, Any] = {"adapter": "lora"}
BF16: dict[str, Any] = {"dtype": torch.bfloat16}
CLIP: dict[str, Any] = {"options": {"max_grad_norm": 1.0}}
CASES = {
    "dense": Case(),
    "dense, clipped": Case(**CLIP),
    "dense, stochastic": Case(options={"state_format": "4bit", "weight_rounding": "stochastic"}, **BF16),
    "dense, remainder in backward": Case(
        options={"weight_rounding": "remainder", "step_in_backward": True}, **BF16
    ),
    "accumulate": Case(accumulate=True, **CLIP),
    "scaled": Case(scaled=True, **CLIP),
    "NF4": Case(adapter="nf4"),
    "NF4 in bf16": Case(adapter="nf4", **BF16),
    "int8": Case(adapter="int8"),
    "checkpoint": Case(checkpoint=True),
    "checkpoint of NF4": Case(adapter="nf4", checkpoint=True),
    "Lion": Case(optim.Lion, **LORA, **CLIP),
    "SGD": Case(optim.SGD, **LORA),
    "AdEMAMix": Case(optim.AdEMAMix, **LORA),
    "ScheduleFreeAdamW": Case(optim.ScheduleFreeAdamW, **LORA),
    "Muon": Case(optim.Muon, **LORA),
    "LAMB": Case(optim.LAMB, **LORA),
    "Adafactor": Case(optim.Adafactor, **LORA),
    "CAME": Case(optim.CAME, **LORA),
}


@pytest.fixture
def cuda_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the state of the GPU's random generator, which a checkpoint saves without synchronising."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("walked_backward", "cuda_generator")
def test_a_step_stays_on_the_device(name: str) -> None:
    case = CASES[name]
    real, model = case.model(), case.model()
    ids = torch.randint(0, VOCAB, (2, 16))
    with Recorder("cpu") as expected:
        case.train(real, ids)
    with fake_cuda(model) as mode:
        ids = mode.from_tensor(ids).to("cuda")
        with Recorder("cuda") as found:
            case.train(model, ids)
        devices = {t.device.type for t in (*model.parameters(), *model.buffers())}
    assert devices == {"cuda"}
    assert found.problems == []
    for received, wanted in zip(found.calls, expected.calls):
        assert received == wanted
    assert len(found.calls) == len(expected.calls) > 400
    assert any(call.startswith("shoestring._linear_cross_entropy") for call, _ in found.calls)


@pytest.mark.parametrize("name", ["dense", "NF4", "checkpoint", "scaled", "Muon"])
def test_a_step_on_the_meta_device(name: str) -> None:
    """Meta tensors call the same operators as CPU tensors, and read no value."""
    case = CASES[name]
    real, model = case.model(), case.model()
    model.to("meta")
    ids = torch.randint(0, VOCAB, (2, 16))
    with Recorder("cpu") as expected:
        case.train(real, ids)
    ids = ids.to("meta")
    with Recorder("meta") as found:
        case.train(model, ids)
    assert found.problems == []
    assert found.calls == expected.calls


@pytest.mark.parametrize("case", emulator_cases.CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("device", ["meta", "cuda"])
@pytest.mark.usefixtures("walked_backward")
def test_operators(case: Callable[[str], emulator_cases.Results], device: str) -> None:
    """Every operator with a kernel gives shapes and dtypes of the CPU on meta and on fake CUDA tensors."""
    expected = {name: (t.shape, t.dtype) for name, (t, _) in case("cpu").items()}
    with fake_cuda() if device == "cuda" else nullcontext():
        found = {name: (t.shape, t.dtype, t.device.type) for name, (t, _) in case(device).items()}
    assert found == {name: (*kind, device) for name, kind in expected.items()}


@pytest.mark.parametrize("name", ["dense", "NF4", "checkpoint of NF4", "dense, remainder in backward"])
def test_the_walk_through_the_graph_gives_the_bits_of_the_engine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    models = [case.model(), case.model()]
    ids = torch.randint(0, VOCAB, (2, 16))
    case.train(models[0], ids)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run_backward)
    case.train(models[1], ids)
    # The tensors of the model before training, after training with the engine, and after the walk.
    for start, engine, walk in zip(case.model().parameters(), *(m.parameters() for m in models)):
        if engine.requires_grad:
            assert torch.equal(engine, walk)
            assert engine.dim() == 1 or not torch.equal(engine, start)


SYNCHRONISING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float()": lambda x: float(x[0]),
    "if": lambda x: bool(x.any()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "mask to assign": lambda x: x.__setitem__(x > 0, x[:1]),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "copy to the host": lambda x: x.cpu(),
    "copy from the host": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "copy into the host's tensor": lambda x: torch.zeros(4, device="cpu").copy_(x),
    "result on the host": lambda x: torch.zeros(4, device="cpu"),
}
# Errors of fake tensors, which have no values, where an operator reads values.
REFUSED = (RuntimeError, DataDependentOutputException, DynamicOutputShapeException)


@pytest.mark.parametrize("what", SYNCHRONISING)
def test_the_recorder_finds_what_synchronises(what: str) -> None:
    with fake_cuda():
        x = torch.rand(4, device="cuda")
        with Recorder("cuda") as found:
            x.mul(2).add_(x).sum()
        assert found.problems == [] and len(found.calls) == 3
        with Recorder("cuda") as found, suppress(*REFUSED):
            SYNCHRONISING[what](x)
    assert found.problems


def test_the_recorder_finds_a_wrong_implementation_for_meta() -> None:
    """An implementation for Meta that returns another dtype than the CPU's changes the recorded calls."""
    with torch.library._scoped_library("fake_device_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        library.impl("double", lambda x: torch.empty_like(x, dtype=torch.float64), "Meta")
        calls = []
        for device in ("cpu", "meta"):
            with Recorder(device) as found:
                torch.ops.fake_device_test.double(torch.ones(3, device=device))
            calls.append(found.calls)
    assert calls[0] != calls[1]
