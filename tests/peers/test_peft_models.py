"""Adapters of PEFT's configurations on tiny models of 13 architectures, with PEFT as the reference.

From one seed, both libraries add an adapter and train it for two steps of plain gradient descent. Then the
files that they save have the same tensors, each loads the other's file, and all logits agree.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, logits, tiny
from torch import nn

import shoestring

peft = pytest.importorskip("peft")
from peft.utils import constants  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

HEADS = {"bert": "classifier"}
# A second name to choose modules by, in each architecture.
MLPS = {
    "gpt2": "c_fc", "gpt_neox": "dense_h_to_4h", "opt": "fc1", "falcon": "dense_h_to_4h", "bert": "intermediate.dense",
    "phi3": "gate_up_proj", "mixtral": "o_proj",
}  # fmt: skip
PREFIX = "base_model.model."


def targets(model: str) -> list[str]:
    """Return names of attention's projections."""
    known = {"phi3": ["qkv_proj"], **constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING}
    return list(known.get(tiny(model).config.model_type, ["q_proj", "v_proj"]))


def lora(**options: Any) -> Any:
    return lambda model: peft.LoraConfig(
        **{"target_modules": targets(model), "r": 4, "lora_alpha": 6} | options
    )


# For each name, the function from an architecture to a configuration of PEFT.
CONFIGS: dict[str, Any] = {
    "names": lora(),
    "all-linear": lora(target_modules="all-linear"),
    "default targets": lora(target_modules=None),
    "pattern": lambda m: peft.LoraConfig(r=4, target_modules=rf".*\.1\..*({'|'.join(targets(m))})"),
    "rslora": lora(use_rslora=True),
    "dora": lora(use_dora=True),
    "gaussian": lora(init_lora_weights="gaussian"),
    "orthogonal": lora(init_lora_weights="orthogonal"),
    "random": lora(init_lora_weights=False),
    "bias of adapters": lora(bias="lora_only"),
    "all biases": lora(bias="all"),
    "own bias": lora(lora_bias=True),
    "dropout": lora(lora_dropout=0.1),
    "one layer": lora(layers_to_transform=[1]),
    "ranks": lambda m: lora(rank_pattern={targets(m)[0]: 2}, alpha_pattern={targets(m)[0]: 5})(m),
    "excluded": lambda m: lora(target_modules="all-linear", exclude_modules=[MLPS.get(m, "up_proj")])(m),
    "trained head": lambda m: lora(modules_to_save=[HEADS.get(m, "lm_head")])(m),
    "token indices": lora(trainable_token_indices=[5, 7]),
    "task": lambda m: lora(task_type="SEQ_CLS" if m == "bert" else "CAUSAL_LM")(m),
    "inference": lora(inference_mode=True),
    "vera": lambda m: peft.VeraConfig(r=4, target_modules=targets(m)[:1]),
    "ia3": lambda m: peft.IA3Config(target_modules=targets(m)[:1], feedforward_modules=[]),
}
CASES = [(model, config) for model in MODELS for config in CONFIGS]


def by_options(error: Exception, config: Any) -> bool:
    """Return whether an error names an option of the configuration, or its value."""
    text = str(error)
    given = {k: v for k, v in config.to_dict().items() if v}
    return any(k in text for k in given)


def train(model: nn.Module) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    for step in range(2 * bool(params)):
        for p in params:
            p.grad = None
        logits(model, seed=step).square().mean().backward()
        with torch.no_grad():
            for p in params:
                p -= 0 if p.grad is None else 0.5 * p.grad


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)


@pytest.mark.sample(40)
@pytest.mark.parametrize(("model", "kind"), CASES, ids=[f"{m}-{c.replace(' ', '_')}" for m, c in CASES])
def test_same_adapter(model: str, kind: str, tmp_path: Path, seed: int) -> None:
    configs = [CONFIGS[kind](model) for _ in range(2)]
    bases = [tiny(model) for _ in range(2)]
    torch.manual_seed(seed)
    try:
        theirs = peft.get_peft_model(bases[0], configs[0])
    except ValueError as error:
        pytest.skip(f"no reference, since PEFT refuses it: {error}")
    torch.manual_seed(seed)
    try:
        ours = shoestring.lora.apply(bases[1], configs[1])
    except ValueError as error:
        assert by_options(error, configs[1]), error
        pytest.skip(f"refused by name: {error}")
    trained = [sorted(tuple(p.shape) for p in m.parameters() if p.requires_grad) for m in (ours, theirs)]
    assert trained[0] == trained[1]
    for m in (theirs, ours):
        m.eval()  # without dropout
        train(m)
    expected = logits(theirs).detach()
    same(logits(ours).detach(), expected)

    theirs.save_pretrained(tmp_path / "theirs")
    shoestring.lora.save_adapter(ours, tmp_path / "ours")
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()
    for key, value in files[0].items():
        same(value, files[1][key])
    json.loads((tmp_path / "ours" / "adapter_config.json").read_text())

    same(logits(shoestring.lora.load_adapter(tiny(model), tmp_path / "theirs").eval()).detach(), expected)
    same(logits(peft.PeftModel.from_pretrained(tiny(model), tmp_path / "ours").eval()).detach(), expected)
