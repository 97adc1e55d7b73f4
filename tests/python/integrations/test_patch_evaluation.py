"""A model patched by shoestring.patch has logits in evaluation mode, so that metrics of a Trainer work."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoestring

transformers = pytest.importorskip("transformers")

import test_patch_encoders as encoders  # noqa: E402
from test_patch import VOCAB, batch, build  # noqa: E402


def models(kind: str) -> tuple[Any, Any]:
    """Return a model to patch and a copy of it."""
    model = build("Gemma2") if kind == "decoder" else encoders.build("Bert", "ForMaskedLM", **encoders.TEXT)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_when_logits_are_in_the_output(kind: str) -> None:
    model, plain = models(kind)
    inputs = batch()
    expected = plain.eval()(**inputs)
    for logits, trained, evaluated in ((None, False, True), (True, True, True), (False, False, False)):
        report = shoestring.patch(model, logits=logits)
        for mode, wanted in ((True, trained), (False, evaluated)):
            out = model.train(mode)(**inputs)
            assert (out.logits is not None) == wanted
            if wanted and not mode:
                torch.testing.assert_close(out.logits, expected.logits, rtol=1e-3, atol=1e-4)
            if not mode:
                torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-6)
        report.undo()


def test_generate_between_steps() -> None:
    model, plain = models("decoder")
    shoestring.patch(model)
    inputs = batch()
    for each in (model, plain):
        each.train()(**inputs).loss.backward()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens = [each.eval().generate(inputs["input_ids"], **options) for each in (model, plain)]
    assert torch.equal(*tokens)
    assert model.train()(**inputs).logits is None


@pytest.mark.parametrize("logits", [None, False])
def test_trainer_with_metrics(logits: bool | None, tmp_path: Path) -> None:
    """The metrics and the losses of a Trainer equal those of the plain model; training has no logits."""
    model, plain = build(), build()
    plain.load_state_dict(model.state_dict())
    shoestring.patch(model, logits=logits)
    rows = [torch.randint(3, VOCAB, (9,)) for _ in range(8)]
    data = [{"input_ids": row, "labels": row} for row in rows]

    def accuracy(found: Any) -> dict[str, float]:
        hits = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
        return {"accuracy": float(hits.mean())}

    def run(each: Any, metrics: Any) -> tuple[dict[str, float], Any, list[bool]]:
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, per_device_eval_batch_size=4,
            learning_rate=1e-2, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
            prediction_loss_only=False, seed=0,
        )  # fmt: skip
        seen: list[bool] = []
        hook = each.register_forward_hook(
            lambda module, args, out: seen.append(out.get("logits") is not None) if module.training else None
        )
        trainer = transformers.Trainer(
            each, settings, train_dataset=data, eval_dataset=data, compute_metrics=metrics
        )
        trainer.train()
        hook.remove()
        return trainer.evaluate(), trainer.predict(data).predictions, seen

    expected, predictions, _ = run(plain, accuracy)
    ours, found, seen = run(model, accuracy if logits is None else None)
    assert seen and not any(seen)
    assert abs(ours["eval_loss"] - expected["eval_loss"]) <= 1e-4 * expected["eval_loss"]
    if logits is None:
        assert ours["eval_accuracy"] == expected["eval_accuracy"]
        np.testing.assert_allclose(found, predictions, rtol=1e-2, atol=1e-2 * np.abs(predictions).max())
    else:
        assert found is None or len(found) == 0
