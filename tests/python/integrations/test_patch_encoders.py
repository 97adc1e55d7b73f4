"""shoestring.patch on encoders, image models and models of an encoder and a decoder."""

import copy
import io
import sys
from typing import Any

import pytest
import torch
from test_patch_layers import operators
from torch import Tensor, nn

import shoestring
from relative_error import relative_error
from same_models import assert_same
from shoestring.integrations.transformers import names

transformers = pytest.importorskip("transformers")

VOCAB = 97
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
IMAGE = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
}
DISTIL = {"vocab_size": VOCAB, "dim": 64, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
DISTIL |= {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 64}
MODERN = {"eos_token_id": 1, "bos_token_id": 2, "cls_token_id": 3, "sep_token_id": 4}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
# The heads are an attribute of the model, an attribute of a module of the model, or deeper. Albert's layers
# share their weights, and DebertaV2 has an attention of its own.
MASKED: dict[str, dict[str, Any]] = {
    "Bert": TEXT,
    "Roberta": TEXT,
    "DistilBert": DISTIL,
    "Electra": {**TEXT, "embedding_size": 64},
    "ModernBert": {**TEXT, **MODERN},
    "Albert": {**TEXT, "embedding_size": 32},
    "DebertaV2": TEXT,
}


def build(name: str, kind: str, **options: Any) -> Any:
    transformers.logging.set_verbosity_error()
    model = getattr(transformers, name + kind)(getattr(transformers, name + "Config")(**options))
    # Biases are randomised too, because transformers initialises them with zero.
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    return model.eval()


def batch(share: float = 0.3) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (2, 11))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels = torch.where((torch.rand(2, 11) < share) & (mask > 0), ids, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, 32, 32), "labels": torch.tensor([0, 1, 1])}


@pytest.mark.parametrize("name", MASKED)
def test_masked_language_models(name: str) -> None:
    model = build(name, "ForMaskedLM", **MASKED[name])
    plain = copy.deepcopy(model)
    report = shoestring.patch(model, logits=False)
    inputs = batch()
    assert "loss without logits" in str(report) and "fused LayerNorm" in str(report)
    assert model(**inputs).logits is None
    assert_same(model, plain, inputs)
    assert_same(model, plain, {**inputs, "labels": inputs["input_ids"]})
    torch.testing.assert_close(
        model(inputs["input_ids"]).logits, plain(inputs["input_ids"]).logits, rtol=1e-3, atol=1e-3
    )
    report.undo()
    assert type(model) is type(plain)
    assert [type(a) for a in model.modules()] == [type(b) for b in plain.modules()]
    assert torch.equal(model(**inputs).loss, plain(**inputs).loss)


def test_the_head_runs_for_tokens_with_labels_only() -> None:
    model = build("Bert", "ForMaskedLM", **TEXT)
    rows: list[int] = []
    shoestring.patch(model, logits=False)
    model.cls.predictions.transform.dense.register_forward_hook(
        lambda module, args, out: rows.append(out[..., 0].numel())
    )
    inputs = batch()
    model(**inputs).loss.backward()
    counted = int((inputs["labels"] != -100).sum())
    assert 0 < counted < 22 and rows[-1] == counted
    # A hook on the head expects the hidden states of all tokens.
    model.cls.register_forward_hook(lambda *_: None)
    model(**inputs)
    assert rows[-1] == 22


def test_no_label_at_all_and_logits_on_request() -> None:
    model = build("Bert", "ForMaskedLM", **TEXT)
    plain = copy.deepcopy(model)
    shoestring.patch(model, logits=True)
    inputs = batch()
    torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits, rtol=1e-3, atol=1e-4)
    ignored = {**inputs, "labels": torch.full_like(inputs["labels"], -100)}
    assert model(**ignored).loss.isnan() and plain(**ignored).loss.isnan()
    with pytest.raises(IndexError):
        model(**{**inputs, "labels": torch.full_like(inputs["labels"], VOCAB)})
    assert model(**inputs).logits is not None and model.cls is model._modules["cls"]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("Bert", "ForSequenceClassification", TEXT),
        ("Bert", "ForTokenClassification", TEXT),
        ("ViT", "ForImageClassification", IMAGE),
        ("DeiT", "ForImageClassification", IMAGE),
        ("T5", "ForConditionalGeneration", T5),
    ],
)
def test_other_losses_stay(name: str, kind: str, options: dict[str, Any]) -> None:
    model = build(name, kind, **options)
    plain = copy.deepcopy(model)
    report = shoestring.patch(model)
    assert "attention of shoestring" in str(report) and "fused" in str(report)
    if "Image" in kind:
        inputs = images()
    else:
        inputs = batch()
        if "Sequence" in kind:
            inputs["labels"] = torch.tensor([0, 1])
        elif "Token" in kind:
            inputs["labels"] = inputs["labels"].clamp(max=1)
    assert_same(model, plain, inputs)
    report.undo()
    assert [type(a) for a in model.modules()] == [type(b) for b in plain.modules()]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [("Bert", "Model", TEXT), ("CLIPVision", "Model", IMAGE), ("SiglipVision", "Model", IMAGE)],
)
def test_models_without_a_loss(name: str, kind: str, options: dict[str, Any]) -> None:
    model = build(name, kind, **options)
    plain = copy.deepcopy(model)
    assert "attention of shoestring" in str(shoestring.patch(model))
    inputs = {"input_ids": batch()["input_ids"]} if name == "Bert" else images()
    inputs.pop("labels", None)
    ours, theirs = (each(**inputs).last_hidden_state for each in (model, plain))
    assert relative_error(ours, theirs) < 1e-5


def test_what_is_left_alone_says_why() -> None:
    """A loss that needs more than labels stays, and so does the attention of a model that was not run."""
    model = build("Bert", "ForPreTraining", **TEXT)
    plain = copy.deepcopy(model)
    report = shoestring.patch(model)
    assert report.left[0][0] == "cls.predictions.decoder" and "no loss from" in report.left[0][1]
    inputs = {**batch(), "next_sentence_label": torch.tensor([0, 1])}
    assert_same(model, plain, inputs)
    bart = transformers.BartConfig(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1)
    report = shoestring.patch(transformers.BartForConditionalGeneration(bart))
    assert ("lm_head", "a loss that needs its logits") in [(a, b[:28]) for a, b in report.left]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    audio = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**sizes, conv_dim=[16] * 7))
    report = shoestring.patch(audio)
    assert "not run on few inputs" in report.left[0][1] and "attention of" not in str(report)


def test_a_module_that_computes_something_else_stays() -> None:
    model = build("Bert", "ForMaskedLM", **TEXT)
    output = type(model.bert.encoder.layer[0].output)

    class Scaled(output):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
            return super().forward(hidden_states, 1.001 * input_tensor)

    class OtherGELU(nn.GELU):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1.01

    model.bert.encoder.layer[0].output.__class__ = Scaled
    model.bert.encoder.layer[1].intermediate.intermediate_act_fn = OtherGELU()
    plain = copy.deepcopy(model)
    left = dict(shoestring.patch(model).left)
    assert set(left) == {
        "bert.encoder.layer.0.output",
        "bert.encoder.layer.1.intermediate.intermediate_act_fn",
    }
    assert_same(model, plain, batch())


def test_hooks_of_the_norm_run() -> None:
    model = build("Bert", "ForMaskedLM", **TEXT)
    shoestring.patch(model)
    calls: list[int] = []
    model.bert.encoder.layer[0].output.LayerNorm.register_forward_hook(lambda *_: calls.append(1))
    model(**batch())
    assert calls == [1]


def test_dropout() -> None:
    """Dropout keeps its share of elements and scale, is the same for a seed, and is off in evaluation."""
    model = build("Bert", "ForMaskedLM", **{**TEXT, "hidden_dropout_prob": 0.25})
    plain = copy.deepcopy(model)
    report = shoestring.patch(model)
    assert sum("dropout without a mask" in change.what for change in report.changes) == 5
    inputs = batch()
    assert_same(model, plain, inputs)
    drop = model.bert.embeddings.dropout.train()
    x = torch.ones(400, 500, requires_grad=True)
    y = drop(x)
    y.sum().backward()
    assert torch.equal(x.grad, y) and y.unique().tolist() == pytest.approx([0, 4 / 3])
    # The share of 200,000 elements has a standard deviation of 0.001.
    assert abs((y == 0).float().mean() - 0.25) < 0.006
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        losses.append(model.train()(**inputs).loss)
    assert torch.equal(*losses) and not torch.equal(losses[0], model(**inputs).loss)
    report.undo()
    assert "dropout" not in str(shoestring.patch(model, dropout=False))


def test_training_copies_and_files() -> None:
    """Over 30 steps, the losses of a patched and a plain model stay equal within rounding."""
    model = build("Bert", "ForMaskedLM", **TEXT)
    transformers.set_seed(1)
    model.init_weights()
    plain = copy.deepcopy(model)
    shoestring.patch(model)
    found: list[list[float]] = []
    batches = [batch() for _ in range(30)]
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3)
        found.append([])
        for inputs in batches:
            loss = each.train()(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[-1].append(loss.item())
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    for twin in (copy.deepcopy(model), _pickled(model)):
        assert [type(a) for a in twin.modules()] == [type(b) for b in plain.modules()]
        assert all("_shoestring" not in key for part in twin.modules() for key in part.__dict__)


def _pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_bf16_autocast_and_checkpointing() -> None:
    model = build("Bert", "ForMaskedLM", **TEXT)
    plain = copy.deepcopy(model)
    shoestring.patch(model)
    inputs = batch(1.0)
    exact = plain(**inputs).loss
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(**inputs).loss, plain(**inputs).loss
        calls = operators(
            lambda: model.bert.encoder.layer[0].output(torch.randn(2, 5, 48), torch.randn(2, 5, 64))
        )
    # The bf16 output of the linear layer is added to the fp32 residual within the norm.
    assert calls.count("shoestring::add_layer_norm") == 1 and not any("aten::add." in call for call in calls)
    assert relative_error(ours, exact) <= 1.5 * relative_error(theirs, exact) + 2e-3
    model.train().gradient_checkpointing_enable()
    assert_same(model, plain, inputs)
    half = build("ViT", "ForImageClassification", **IMAGE).bfloat16()
    shoestring.patch(half)
    assert half(pixel_values=images()["pixel_values"].bfloat16()).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_compiled(name: str) -> None:
    model = build(name, "ForMaskedLM", **MASKED[name])
    plain = copy.deepcopy(model)
    claimed = dict(names._claims)
    report = shoestring.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = batch()
    losses = [each(**inputs).loss for each in (compiled, plain)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for loss in losses:
        loss.backward()
    ours, theirs = (each.get_input_embeddings().weight.grad for each in (model, plain))
    assert relative_error(ours, theirs) < 1e-4
    assert hasattr(sys.modules[type(plain).__module__], "_shoestring_CrossEntropyLoss")
    report.undo()
    assert names._claims == claimed


def test_image_layers_add_within_their_norms() -> None:
    """Each residual sum is part of the norm after it, and under autocast the norm rounds its result."""
    model = build("ViT", "ForImageClassification", **IMAGE)
    plain = copy.deepcopy(model)
    report = shoestring.patch(model)
    assert (
        sum("residual sum and norm together, rounded once" in change.what for change in report.changes) == 2
    )
    inputs = images()
    exact = plain(**inputs).loss
    with torch.autocast("cpu", torch.bfloat16):
        with torch.profiler.profile() as profiler:
            ours = model(**inputs).loss
        theirs = plain(**inputs).loss
    # Only position embeddings are added by themselves: a layer also computes the norm that reads its output.
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["aten::add"] == 1 and counts["shoestring::add_layer_norm"] == 4
    assert relative_error(ours, exact) <= 1.5 * relative_error(theirs, exact) + 2e-3
    assert_same(model, plain, inputs)
    model.train()
    plain.train()
    assert_same(model, plain, inputs)
    # A hook of a norm sees the sum, and a changed sum is normalised anew.
    norm = model.vit.layers[1].layernorm_before
    handle = norm.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    other = plain.vit.layers[1].layernorm_before.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    assert_same(model, plain, inputs)
    handle.remove()
    other.remove()
    report.undo()
    assert torch.equal(model(**inputs).loss, plain(**inputs).loss)


def test_clip_layers_add_within_their_norms() -> None:
    config = {k: v for k, v in IMAGE.items() if k != "hidden_dropout_prob"}
    model = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**config))
    plain = copy.deepcopy(model)
    pixels = images()["pixel_values"]
    report = shoestring.patch(model)
    assert sum("residual sum and norm together" in change.what for change in report.changes) == 2
    ours, theirs = model(pixel_values=pixels).last_hidden_state, plain(pixel_values=pixels).last_hidden_state
    assert relative_error(ours, theirs) < 1e-5


def saved_bytes(model: Any, inputs: dict[str, Tensor]) -> int:
    """Return the bytes of all tensors that autograd saves for backward, parameters excluded."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**inputs).loss
    assert loss.requires_grad
    return sum(found.values())


def test_mlps_do_not_save_the_result_of_gelu() -> None:
    model = build("ViT", "ForImageClassification", **{**IMAGE, "intermediate_size": 256})
    inputs = images()
    report = shoestring.patch(model, mlp=False)
    before = saved_bytes(model, inputs)
    report.undo()
    report = shoestring.patch(model)
    assert sum("GELU without its result" in change.what for change in report.changes) == 2
    # Two layers, 3 images with 17 tokens each, 256 features of 4 bytes
    assert before - saved_bytes(model, inputs) == 2 * 3 * 17 * 256 * 4
    plain = copy.deepcopy(model)
    assert_same(model, plain, inputs)

    class Adds(type(plain.vit.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1e-3 * x

    plain.vit.layers[0].mlp.__class__ = Adds
    left = dict(shoestring.patch(plain).left)
    assert list(left) == ["vit.layers.0.mlp"]
