"""A tiny Llama trains on the device as on the CPU: patched, with adapters, with 4-bit weights, under autocast."""

import copy
from typing import Any

import pytest
import torch
from simdev import device as simdev
from torch import Tensor, nn

import shoestring
from lora_models import llama
from training import STEPS, compare, train

IDS = [
    torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(step), dtype=torch.int64)
    for step in range(STEPS)
]


def adamw(model: nn.Module, device: str) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = shoestring.optim.AdamW(trained, lr=1e-3, max_grad_norm=1.0)
    return optimizer


def loss_of(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def patched(model: nn.Module) -> nn.Module:
    model.train()
    shoestring.patch(model)
    return model


def with_dropout(model: nn.Module) -> nn.Module:
    model.config.attention_dropout = 0.1
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return patched(model)


def eager(model: nn.Module) -> nn.Module:
    model.config._attn_implementation = "eager"
    return model.train()


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    return patched(shoestring.lora.apply(model, rank=4, **options))


MODELS = {
    "eager": eager,
    "patched": patched,
    "dropout": with_dropout,
    "lora": adapted,
    "lora dropout": lambda model: adapted(model, dropout=0.5),
    "dora": lambda model: adapted(model, dora=True),
    "nf4": lambda model: adapted(model, quantize="nf4", double_quant=True),
    "int4": lambda model: adapted(model, quantize="int4"),
    "int8": lambda model: adapted(model, quantize="int8"),
    "quantisation-aware": lambda model: patched(shoestring.prepare_quantized(model, "nf4")),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_cpu(mode: simdev.Mode, name: str) -> None:
    waited = compare(MODELS[name](llama()), adamw, batches=IDS, loss_of=loss_of)
    assert waited == []


def test_bf16_equals_cpu(mode: simdev.Mode) -> None:
    waited = compare(patched(llama(dtype=torch.bfloat16)), adamw, batches=IDS, loss_of=loss_of)
    assert waited == []


def test_checkpointed_blocks_equal_cpu(mode: simdev.Mode) -> None:
    """Blocks that are computed again draw the same random numbers for dropout."""
    model = adapted(llama(), dropout=0.5)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    waited = compare(model, adamw, batches=IDS, loss_of=loss_of)
    # Without a cache, Transformers asks once a step whether the batch holds packed sequences.
    assert waited == ["item()"] * (STEPS - 1)


def test_autocast_is_close_to_cpu(mode: simdev.Mode) -> None:
    """PyTorch's lists of operators for autocast differ, so that results differ by roundings to bf16."""

    def surround(model: nn.Module, device: str) -> torch.autocast:
        return torch.autocast(device, torch.bfloat16)

    model = patched(llama())
    on_device = copy.deepcopy(model).to("simdev")
    how = {"batches": IDS, "loss_of": loss_of, "surround": surround}
    losses, waited = train(on_device, "simdev", adamw, **how)
    expected, _ = train(model, "cpu", adamw, **how)
    assert waited == []
    # a bf16 number has 8 bits, and the roundings of two layers add up
    torch.testing.assert_close(losses.cpu(), expected, rtol=2**-7, atol=0)
    assert not torch.equal(
        losses.cpu(), train(copy.deepcopy(model), "cpu", adamw, batches=IDS, loss_of=loss_of)[0]
    )


def test_log_is_the_only_synchronisation(mode: simdev.Mode) -> None:
    model = patched(llama()).to("simdev")
    _, waited = train(model, "simdev", adamw, batches=IDS, loss_of=loss_of)
    assert waited == []
    loss_of(model, IDS[0].to("simdev", non_blocking=True)).item()
    assert simdev.take_synchronisations() == ["item()"]
