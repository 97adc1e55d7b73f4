"""shoestring.patch does not change the losses and gradients of Hugging Face models."""

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring
from relative_error import relative_error
from same_models import assert_same

transformers = pytest.importorskip("transformers")

VOCAB = 97  # a vocabulary that is no multiple of a SIMD vector's width
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
# Each of these models processes its logits differently: with a softcap, a factor, a divisor, a bias,
# contiguous(), or an auxiliary loss.
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Gemma2": {"final_logit_softcapping": 0.7, "head_dim": 16},
    "Phi": {},
    "GPT2": GPT2,
    "GPTNeoX": {},
    "Cohere": {"logit_scale": 0.3},
    "Granite": {"logits_scaling": 4.0},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 64},
    "Mixtral": {"output_router_logits": True, "num_local_experts": 4},
}


def build(name: str = "Llama", **extra: Any) -> Any:
    transformers.logging.set_verbosity_error()
    config = getattr(transformers, name + "Config")(**{**SMALL, **MODELS[name], **extra})
    kind = getattr(transformers, name + "ForCausalLM", None) or getattr(transformers, name + "LMHeadModel")
    model = kind(config)
    # Biases are randomised too, because transformers initialises them with zero.
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model.eval()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (2, 11))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name: str) -> None:
    model = build(name)
    plain = copy.deepcopy(model)
    shoestring.patch(model, logits=False)
    inputs = batch()
    assert "logits" not in model(**inputs)
    assert_same(model, plain, inputs)
    assert_same(model, plain, {**inputs, "num_items_in_batch": torch.tensor(7)})
    assert_same(model, plain, {**inputs, "shift_labels": inputs["labels"].roll(-1, 1)})
    expected = plain(inputs["input_ids"]).logits
    torch.testing.assert_close(
        model(inputs["input_ids"]).logits, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item()
    )


def test_what_is_kept_and_ignored() -> None:
    model = build()
    plain = copy.deepcopy(model)
    shoestring.patch(model)
    inputs = batch()
    kept = {**inputs, "logits_to_keep": 5, "shift_labels": inputs["labels"][:, -5:].contiguous()}
    assert_same(model, plain, kept)
    assert_same(
        model,
        plain,
        {**inputs, "ignore_index": int(inputs["labels"][1, 3])} | {"labels": inputs["input_ids"]},
    )
    none = {**inputs, "labels": torch.full_like(inputs["labels"], -100)}
    assert model(**none).loss.isnan() and plain(**none).loss.isnan()
    with torch.no_grad():
        assert relative_error(model(**inputs).loss, plain(**inputs).loss) < 1e-6


def test_logits_on_request_and_tuples() -> None:
    model = build("Gemma2")
    plain = copy.deepcopy(model)
    inputs = batch()
    with_logits = shoestring.patch(model, logits=True)
    torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits)
    with_logits.undo()
    shoestring.patch(model, logits=False)
    loss, logits, *_ = model(**inputs, return_dict=False)
    assert logits is None and relative_error(loss, plain(**inputs).loss) < 1e-6


def test_undo_restores_everything() -> None:
    model = build()
    kind, attributes, head = type(model), dict(model.__dict__), model.lm_head
    report = shoestring.patch(model)
    assert type(model) is not kind and type(model).__name__ == kind.__name__ and isinstance(model, kind)
    assert model.lm_head is head and "lm_head" in str(report)
    # Patching `model` does not patch other models of its class.
    assert build()(**batch()).logits is not None
    model(**batch())
    report.undo()
    report.undo()
    assert type(model) is kind and model.__dict__.keys() == attributes.keys()
    assert all(model.__dict__[key] is value for key, value in attributes.items())
    assert model(**batch()).logits is not None


def test_a_loss_of_the_users_gets_logits() -> None:
    model = build()
    shoestring.patch(model)
    model.loss_function = lambda logits, labels, **_: logits.square().sum()
    out = model(**batch())
    assert out.loss == out.logits.square().sum()


def test_patched_twice_is_refused() -> None:
    model = build()
    report = shoestring.patch(model)
    with pytest.raises(ValueError, match="patched already"):
        shoestring.patch(model)
    report.undo()
    shoestring.patch(model)


def test_an_exception_leaves_the_model_whole() -> None:
    model = build()
    shoestring.patch(model)
    inputs = batch()
    with pytest.raises(IndexError):
        model(input_ids=inputs["input_ids"], labels=torch.full_like(inputs["labels"], VOCAB))
    assert isinstance(model.lm_head, nn.Linear)
    assert model(inputs["input_ids"]).logits.shape[-1] == VOCAB


class Biased(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """A Llama that applies the function in its class attribute ``change`` to its logits before the loss."""

    change: Callable[[Any], Any]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = type(self).change(self.lm_head(hidden))
        loss = None if labels is None else self.loss_function(logits, labels, VOCAB)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits + 1.0,
        lambda logits: logits + torch.ones(VOCAB),
        lambda logits: logits * torch.linspace(1, 2, VOCAB),
        lambda logits: torch.nn.functional.softplus(logits),
        lambda logits: logits.masked_fill(torch.ones(VOCAB) > 0, -1.0),
        lambda logits: logits[..., : VOCAB - 1],
        lambda logits: logits.tanh().tanh(),
    ],
)
def test_unknown_treatment_of_logits_is_refused(change: Callable[[Any], Any]) -> None:
    kind = type("Changed", (Biased,), {"change": staticmethod(change)})
    model = kind(transformers.LlamaConfig(**SMALL))
    with pytest.raises(TypeError, match="shoestring.patch: model: "):
        shoestring.patch(model)
    assert type(model) is kind
    assert model(input_ids=torch.arange(4)[None]).logits is not None


def test_a_learned_factor() -> None:
    """A trainable factor of the logits has the same gradient with and without shoestring.patch."""
    factor = nn.Parameter(torch.tensor(0.3))
    kind = type("Scaled", (Biased,), {"change": staticmethod(lambda logits: factor * logits)})
    model = kind(transformers.LlamaConfig(**SMALL)).eval()
    inputs = batch()
    grads = []
    for patched in (False, True):
        if patched:
            shoestring.patch(model)
        grads.append(torch.autograd.grad(model(**inputs).loss, factor)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)


def test_generate_copies_and_files(tmp_path: Path) -> None:
    model = build()
    plain = copy.deepcopy(model)
    shoestring.patch(model)
    ids = batch()["input_ids"]
    settings = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))
    twin = copy.deepcopy(model)
    assert type(twin) is type(plain) and twin.__dict__.keys() == plain.__dict__.keys()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is type(plain)
    # The loaded model and the plain one may use different attention implementations, so logits are only
    # close.
    torch.testing.assert_close(loaded(ids).logits, plain(ids).logits)
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_autocast_and_checkpointing() -> None:
    model = build()
    plain = copy.deepcopy(model)
    shoestring.patch(model)
    inputs = batch()
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(model(**inputs).loss, plain(**inputs).loss) < 0.02
    model.train().gradient_checkpointing_enable()
    assert_same(model, plain, inputs)


def test_compiled() -> None:
    model = build("Gemma2")
    plain = copy.deepcopy(model)
    shoestring.patch(model)
    model.config.use_cache = False
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = batch()
    loss = compiled(**inputs).loss
    loss.backward()
    expected = plain(**inputs).loss
    expected.backward()
    assert relative_error(loss, expected) < 1e-6
    assert relative_error(model.lm_head.weight.grad, plain.lm_head.weight.grad) < 1e-5


def test_trainer(tmp_path: Path) -> None:
    """Under Trainer, a patched model has the same losses and final weights as an unpatched one.

    The run uses num_items_in_batch, gradient accumulation and an evaluation.
    """
    plain = build()
    model = copy.deepcopy(plain)
    shoestring.patch(model)
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(0, VOCAB, (8, 9))]
    histories = []
    for name, each in (("plain", plain), ("ours", model)):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / name), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-3, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True,
            prediction_loss_only=True,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = transformers.Trainer(model=each, args=arguments, train_dataset=rows, eval_dataset=rows)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            histories.append([*losses, trainer.evaluate()["eval_loss"]])
    assert histories[0] == pytest.approx(histories[1], rel=1e-4)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative_error(ours, theirs) < 1e-3


@pytest.mark.parametrize("name", ["Cohere", "GPT2", "Gemma2"])
def test_the_commands_loss(name: str) -> None:
    """The training commands' loss, a sum over shifted labels, is equal with and without shoestring.patch."""
    from shoestring.training.run.models import fused_loss, plain_loss

    model = build(name)
    expected = plain_loss(model)(**own_positions())
    assert relative_error(fused_loss(model, 0)(**own_positions()), expected) < 1e-6


def own_positions() -> dict[str, Tensor]:
    ids = torch.arange(22).view(2, 11)
    return {"inputs": ids[:, :-1], "labels": ids[:, 1:]}


def test_the_commands_refuse_a_model_that_shifts_in_any_case() -> None:
    from shoestring.core.errors import InputError
    from shoestring.training.run.models import fused_loss

    kind = type("Shifting", (Biased,), {"change": staticmethod(lambda logits: logits)})
    with pytest.raises(InputError, match="--model: expected a loss of .* use --baseline"):
        fused_loss(kind(transformers.LlamaConfig(**SMALL)), 0)
