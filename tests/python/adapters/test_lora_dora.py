"""Test DoRA: results against PEFT, norm cache, saving, merging, one adapter per batch row, torch.compile."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_models import assert_files_agree, llama, logits, randomise
from shoestring import lora


def layer(dtype: torch.dtype = torch.float64, **options: object) -> nn.Sequential:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(64, 12)).to(dtype)
    return randomise(lora.apply(model, rank=4, alpha=6, target_modules=["0"], dora=True, **options))


def exact(model: nn.Sequential, x: Tensor, name: str = "default") -> Tensor:
    """Compute the output of a DoRA layer by the definition of DoRA, in plain PyTorch."""
    own = model[0]
    weight = own.dense_weight() + own.adapters[name].scaling * own.lora_B[name] @ own.lora_A[name]
    gain = own.lora_magnitude_vector[name] / weight.detach().norm(dim=1)
    return nn.functional.linear(x, gain[:, None] * weight, own.bias)


def test_numbers_and_gradients_are_pefts() -> None:
    peft = pytest.importorskip("peft")
    ours = layer()
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["0"], use_dora=True)
    theirs = peft.get_peft_model(nn.Sequential(nn.Linear(64, 12)).double(), config)
    values = dict(
        zip(["0.base_layer.weight", "0.base_layer.bias"], (ours[0].weight, ours[0].bias), strict=True)
    )
    for attribute in ("lora_A", "lora_B", "lora_magnitude_vector"):
        values[f"0.{attribute}.default.weight"] = getattr(ours[0], attribute)["default"]
    theirs = theirs.double()  # PEFT creates adapters in fp32, so convert them to fp64
    theirs.base_model.model.load_state_dict(values)
    x = torch.randn(5, 64, dtype=torch.float64, requires_grad=True)
    up = torch.randn(5, 12, dtype=torch.float64)
    results = []
    for model in (ours, theirs):
        trained = {n.split(".default")[0][-6:]: p for n, p in model.named_parameters() if p.requires_grad}
        leaves = [x, *(trained[key] for key in sorted(trained))]
        y = model(x)
        results.append([y, *torch.autograd.grad(y, leaves, up)])
    assert len(results[0]) == 5
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-10


def test_starts_as_the_base_with_the_norms_of_its_rows() -> None:
    base = llama()
    model = lora.apply(llama(), rank=4, dora=True)
    assert (logits(model) - logits(base)).abs().max() <= 1e-5
    own, plain = model.model.layers[0].mlp.up_proj, base.model.layers[0].mlp.up_proj
    torch.testing.assert_close(own.lora_magnitude_vector["default"].data, plain.weight.data.norm(dim=1))
    quantised = lora.apply(llama(), rank=4, dora=True, quantize="nf4").model.layers[0].mlp.up_proj
    norms = quantised.weight.dequantize(torch.float32).norm(dim=1)
    torch.testing.assert_close(quantised.lora_magnitude_vector["default"].data, norms)


def test_files_go_to_peft_and_back(tmp_path: Path) -> None:
    assert_files_agree(randomise(lora.apply(llama(), rank=4, alpha=12, dora=True, rslora=True)), tmp_path)


@pytest.mark.device
@pytest.mark.parametrize("quantize", ["nf4", "int4", "int8"])
def test_over_quantised_bases(quantize: str) -> None:
    model = layer(torch.float32, quantize=quantize)
    x = torch.randn(3, 64)
    torch.testing.assert_close(model(x), exact(model, x), rtol=1e-4, atol=1e-4)
    expected = model(x)
    lora.merge(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    lora.unmerge(model)
    assert torch.equal(model(x), expected)


@pytest.mark.device
def test_merged_weight() -> None:
    model = layer()
    x = torch.randn(3, 64, dtype=torch.float64)
    expected = exact(model, x)
    lora.merge(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_norm_is_kept_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    import shoestring.adapters.low_rank as module

    calls = []
    real = module.lora_weight_norm
    monkeypatch.setattr(module, "lora_weight_norm", lambda *a, **k: calls.append(1) or real(*a, **k))
    model = layer()
    own, x = model[0], torch.randn(3, 64, dtype=torch.float64)
    x.requires_grad_()

    def check(expected_calls: int) -> None:
        calls.clear()
        torch.testing.assert_close(model(x), exact(model, x), rtol=1e-12, atol=1e-12)
        assert len(calls) == expected_calls

    model.eval()
    with torch.no_grad():
        check(1)
        check(0)
    calls.clear()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    # Forward has computed the weight norm, since gradients are enabled, and the recomputation has not.
    assert len(calls) == 1
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer.step()
    with torch.no_grad():
        check(1)
        own.weight.mul_(2)
        check(1)
        own.lora_A["default"].data = torch.randn_like(own.lora_A["default"])
        check(1)
        check(0)
    # In training mode every forward computes the weight norm, because an optimizer may change weights without
    # changing their version counter.
    model.train()
    check(1)
    own.lora_A["default"].data.mul_(2)
    check(1)
    calls.clear()
    checkpoint(model, x, use_reentrant=False).sum().backward()
    # The recomputation of a checkpoint reuses the weight norm of its forward, because no optimizer step runs
    # in between.
    assert len(calls) == 1
    model.eval()
    with torch.no_grad():
        check(1)
        twin = copy.deepcopy(model)
        twin[0].lora_B["default"].add_(1)
        torch.testing.assert_close(twin(x), exact(twin, x), rtol=1e-12, atol=1e-12)
        check(0)
    with torch.inference_mode():
        check(0)


@pytest.mark.parametrize("fused", [True, False])
def test_training_in_evaluation_mode_renews_the_norm(fused: bool) -> None:
    """PyTorch's fused optimizers write weights without changing their version counters, and others through .data."""
    model = layer().eval()
    x = torch.randn(3, 64, dtype=torch.float64)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)
    with torch.no_grad():
        model(x)
    for _ in range(3):
        optimizer.zero_grad()
        output = model(x)
        torch.testing.assert_close(output, exact(model, x), rtol=1e-12, atol=1e-12)
        output.square().mean().backward()
        if fused:
            optimizer.step()
        else:
            for p in trained:
                assert p.grad is not None
                p.data -= 0.1 * p.grad
    with torch.no_grad():
        expected = exact(model, x)
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
        model[0].lora_A["default"].data.add_(1)
        expected = exact(model, x)
        lora.merge(model)
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
        lora.unmerge(model)
        model[0].lora_A["default"].data.add_(1)
        model.eval()
        torch.testing.assert_close(model(x), exact(model, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_compiles_whole(quantize: str | None) -> None:
    model = layer(torch.float32, quantize=quantize)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    trained = [p for p in model.parameters() if p.requires_grad]
    for tokens in (3, 5):
        x = torch.randn(tokens, 64)
        results = [torch.autograd.grad(f(x).square().sum(), trained) for f in (compiled, model)]
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            # Change lora_A, so that a cached weight norm would give a wrong result in the next iteration.
            trained[0].add_(0.1)


@pytest.mark.device
def test_several_and_by_row() -> None:
    model = layer()
    lora.apply(model, rank=2, alpha=2, target_modules=["0"], adapter_name="b", dora=True)
    lora.apply(model, rank=3, alpha=1, target_modules=["0"], adapter_name="plain", lora_bias=True)
    randomise(randomise(model, "b"), "plain")
    x = torch.randn(4, 3, 64, dtype=torch.float64)
    own, names = model[0], ["default", "b", "plain"]
    base = nn.functional.linear(x, own.weight, own.bias)
    alone = {}
    for name in names:
        lora.set_adapter(model, name)
        alone[name] = model(x)
    for name in ("default", "b"):
        torch.testing.assert_close(alone[name], exact(model, x, name), rtol=1e-12, atol=1e-12)
    lora.set_adapter(model, names)
    total = base + sum(alone[name] - base for name in names)
    torch.testing.assert_close(model(x), total, rtol=1e-12, atol=1e-12)
    rows = ["plain", "b", None, "default"]
    with lora.adapters_per_row(model, rows):
        mixed = model(x)
    for row, name in enumerate(rows):
        torch.testing.assert_close(mixed[row], alone.get(name, base)[row], rtol=1e-12, atol=1e-12)
    lora.merge(model)
    torch.testing.assert_close(model(x), total, rtol=1e-12, atol=1e-12)


@pytest.mark.device
def test_dropout_drops_what_lora_A_reads_alone() -> None:
    """Dropout changes only the input of lora_A: if lora_B is zero, dropout does not change the output."""
    model = layer(dropout=0.5).train()
    with torch.no_grad():
        model[0].lora_B["default"].zero_()
    x = torch.randn(4, 64, dtype=torch.float64)
    torch.testing.assert_close(model(x), exact(model, x), rtol=1e-12, atol=1e-12)
    randomise(model)
    assert not torch.equal(model(x), model(x))


def test_errors() -> None:
    for options, message in [
        ({"lora_bias": True}, "lora_bias: expected its default with dora, received True"),
        ({"init": "pissa"}, "init: expected its default with dora, received 'pissa'"),
    ]:
        with pytest.raises(ValueError, match=message):
            lora.apply(llama(), dora=True, **options)
