"""Test prefix and prompt tuning of a causal language model."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_models import assert_files_agree, llama, logits
from shoestring import lora

KINDS = {
    "prefix": lora.PrefixOptions(tokens=5),
    "projected prefix": lora.PrefixOptions(tokens=5, projection=True, hidden_size=24),
    "prompt": lora.PromptOptions(tokens=5),
    "prompt of ids": lora.PromptOptions(tokens=5, init=[3, 1, 4]),
}


def peft_config(options: lora.PrefixOptions | lora.PromptOptions) -> object:
    peft = pytest.importorskip("peft")
    if isinstance(options, lora.PromptOptions):
        return peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")
    return peft.PrefixTuningConfig(
        num_virtual_tokens=5,
        task_type="CAUSAL_LM",
        prefix_projection=options.projection,
        encoder_hidden_size=24,
    )


@pytest.mark.parametrize("kind", list(KINDS)[:3])
def test_starts_and_trains_as_peft(kind: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    ours, config = lora.apply(llama(), peft_config(KINDS[kind])), peft_config(KINDS[kind])
    torch.manual_seed(3)
    theirs = peft.get_peft_model(llama(), config).eval()
    mine = [p for p in ours.parameters() if p.requires_grad]
    peers = [p for n, p in theirs.named_parameters() if p.requires_grad]
    assert len(mine) == len(peers) == (5 if KINDS[kind] == KINDS["projected prefix"] else 1)
    for a, b in zip(mine, peers, strict=True):
        a.data.copy_(b)
    assert (logits(ours) - logits(theirs)).abs().max() <= 1e-6
    ids = torch.randint(97, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    losses = [m(input_ids=ids, attention_mask=mask, labels=labels).loss for m in (ours, theirs)]
    torch.testing.assert_close(*losses)
    grads = (torch.autograd.grad(loss, p) for loss, p in zip(losses, (mine, peers), strict=True))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_files_copies_and_generation(kind: str, tmp_path: Path) -> None:
    model = lora.apply(llama(), KINDS[kind])
    assert_files_agree(model, tmp_path)
    expected = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    fresh = lora.apply(llama(), KINDS[kind])
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh), expected)
    ids = torch.randint(97, (2, 4))
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    text = ids
    for _ in range(5):  # generate the tokens without a key-value cache, for comparison
        text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, text)
    with lora.disable_adapter(model):
        assert torch.equal(logits(model), logits(llama()))
    lora.delete_adapter(model, "default")
    assert (
        torch.equal(logits(model), logits(llama()))
        and model.state_dict().keys() == llama().state_dict().keys()
    )
    assert not model._forward_pre_hooks


def test_prefix_is_attended_to_as_keys_and_values() -> None:
    """A prefix of keys and values of some tokens has the same effect as these tokens before the input."""
    model, text = llama(), torch.randint(97, (1, 8))
    cache = model(text[:, :3], use_cache=True).past_key_values
    expected = model(text).logits[:, 3:]
    lora.apply(model, lora.PrefixOptions(tokens=3))
    values = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
    model.virtual_tokens.embedding["default"].data = values.permute(3, 0, 1, 2, 4).flatten(1)
    torch.testing.assert_close(model(text[:, 3:]).logits, expected, rtol=1e-4, atol=1e-5)
    positions = torch.arange(5)[None]
    torch.testing.assert_close(
        model(text[:, 3:], position_ids=positions).logits, expected, rtol=1e-4, atol=1e-5
    )


def test_prompt_of_ids_is_these_tokens() -> None:
    model, text = llama(), torch.randint(97, (1, 5))
    expected = model(torch.cat([torch.tensor([[3, 1, 4, 3, 1]]), text], 1)).logits
    lora.apply(model, KINDS["prompt of ids"])
    for options in ({}, {"position_ids": torch.arange(5)[None]}, {"attention_mask": torch.ones(1, 5)}):
        torch.testing.assert_close(model(text, **options).logits, expected, rtol=1e-4, atol=1e-5)


def test_learns_over_a_quantised_base_and_switches() -> None:
    model = lora.apply(llama(), lora.PromptOptions(tokens=4, init="vocabulary"), quantize="nf4")
    lora.apply(model, lora.PrefixOptions(tokens=3, init="zero"), adapter_name="b")
    lora.apply(model, rank=2, adapter_name="c")
    ids = torch.randint(97, (4, 8))
    shapes = {"default": (4, 12, 97), "b": (4, 8, 97), "c": (4, 8, 97)}
    for name, shape in shapes.items():
        lora.set_adapter(model, name)
        assert model(ids).logits.shape == shape
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=0.05)
        losses: list[Tensor] = []
        for _ in range(4):
            losses.append(model(ids, labels=ids).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0]
    lora.set_adapter(model, ["b", "c"])
    assert model(ids).logits.shape == (4, 8, 97)


def test_errors(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = lora.apply(llama(), KINDS["prompt"])
    lora.apply(model, KINDS["prefix"], adapter_name="b")
    text = peft.PromptTuningConfig(
        num_virtual_tokens=5, task_type="CAUSAL_LM", prompt_tuning_init="TEXT", prompt_tuning_init_text="a",
        tokenizer_name_or_path="b",
    )  # fmt: skip
    for call, message in [
        (
            lambda: lora.set_adapter(model, ["default", "b"]),
            "expected at most one adapter with virtual tokens, received default, b",
        ),
        (
            lambda: lora.merge(model),
            "lora.merge: model: expected adapters of layers, received virtual tokens",
        ),
        (lambda: lora.adapters_per_row(model, ["b"]).__enter__(), "received 'b', which has a VirtualTokens"),
        (
            lambda: lora.apply(nn.Linear(2, 2), KINDS["prefix"]),
            "expected a transformers causal language model .* Linear",
        ),
        (lambda: lora.PrefixOptions(tokens=0), "tokens: expected an integer of at least 1, received 0"),
        (lambda: lora.PrefixOptions(init="one"), "init: expected 'default' or 'zero', received 'one'"),
        (lambda: lora.PromptOptions(init=[]), "init: expected 'random', 'vocabulary' or token ids"),
        (
            lambda: lora.apply(llama(), text),
            "prompt_tuning_init: expected 'RANDOM or SAMPLE_VOCAB; of a text give",
        ),
        (
            lambda: lora.apply(llama(), peft.PrefixTuningConfig(num_virtual_tokens=2, num_layers=7)),
            "num_layers: expected 2, .* received 7",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    lora.set_adapter(model, "b")
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="expected no gradient checkpointing with a prefix"):
        model.train()(torch.ones(1, 2, dtype=torch.long))
    lora.save_adapter(model, tmp_path)
    (tmp_path / "b" / "adapter_config.json").write_text(
        '{"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4}'
    )
    with pytest.raises(ValueError, match="expected the weights that were saved with .*adapter_config.json"):
        lora.load_adapter(llama(), tmp_path / "b")
    weights = tmp_path / "b" / "adapter_model.safetensors"
    # save_file without metadata removes the digest of the configuration from the weights file
    save_file(load_file(weights), weights)
    with pytest.raises(
        ValueError,
        match=r"expected \{'prompt_embeddings': \(4, 128\)\} of floating point, received .*\(5, 128\)",
    ):
        lora.load_adapter(llama(), tmp_path / "b")
