"""Configuration of training runs: the options of `train` and `finetune`, and the presets of model sizes."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from shoestring.core.errors import InputError


@dataclass(frozen=True)
class Preset:
    """Shape of a model with the Llama architecture."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    # the output layer shares the input embedding; useful while embeddings dominate the size
    tied: bool = True


PRESETS = {
    "tiny": Preset(64, 2, 2, 2, 192),
    "mini": Preset(128, 4, 4, 4, 384),
    "small": Preset(256, 6, 4, 4, 768),
    "medium": Preset(512, 8, 8, 8, 1536),
    "base": Preset(768, 12, 12, 12, 2048),  # the size of GPT-2 small
    "large": Preset(1024, 24, 16, 16, 2816),
    "1b": Preset(2048, 22, 32, 4, 5632, tied=False),  # the shape of TinyLlama
}

# Allowed values of command-line options, defined here so that reading them does not import PyTorch.
SCHEDULES = ("constant", "linear", "cosine", "wsd")
DTYPES = ("fp32", "bf16")
MOST_THREADS = max(256, os.cpu_count() or 1)  # a request for tens of thousands of threads kills the process
ESTIMATE_DTYPES = ("fp32", "bf16", "fp16")
DEVICES = ("cuda", "cpu")
QUANTIZE = ("nf4", "int4", "int8", "none")
OPTIMIZERS = ("adamw", "lion", "sgd", "ademamix", "schedule-free-adamw", "lamb", "adafactor", "came", "muon")
STATES = ("8bit", "4bit", "bf16", "fp32")
WEIGHTS = ("plain", "stochastic", "remainder")


@dataclass
class LoopConfig:
    """Options of the training loop of `train` and `finetune`.

    Two runs with equal options and equal data give bitwise equal results.
    """

    seq_len: int = 512
    batch_size: int = 8
    accumulate: int = 1
    steps: int = 200
    lr: float = 1e-3
    warmup: int = 10
    schedule: str = "cosine"
    dtype: str = "fp32"
    clip: float = 1.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    seed: int = 0
    val_fraction: float = 0.02
    eval_every: int = 50
    eval_batches: int = 8
    gradient_checkpointing: bool = False
    optimizer_state: str = "8bit"
    workspace_mb: int = 64
    plain: bool = False


@dataclass
class TrainConfig(LoopConfig):
    """Options of `shoestring train`, which trains a model from scratch."""

    preset: str = "small"
    vocab_size: int = 16384
    tokenizer: str | None = None


@dataclass
class FinetuneConfig(LoopConfig):
    """Options of `shoestring finetune`: LoRA, QLoRA or full fine-tuning of an existing model."""

    model: str = ""
    full: bool = False
    quantize: str | None = "nf4"
    rank: int = 16
    alpha: float = 32.0
    target_modules: str | list[str] = "all-linear"
    pack: bool = True  # pack examples without padding if the model uses shoestring's attention
    lr: float = 2e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)

    def check(self) -> None:
        """Raise InputError for options that contradict each other; the parser has checked each option alone."""
        # The int8 layer of bitsandbytes also rounds its input to 8 bits, so it computes a different model
        # than shoestring's int8. bitsandbytes has no int4 layer.
        if self.plain and self.quantize not in (None, "nf4"):
            raise InputError(f"--quantize: expected nf4 | none with --plain, got {self.quantize}")


@dataclass
class Fingerprint:
    """The settings that must be equal for a run to be resumed bit for bit."""

    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: LoopConfig, **more: Any) -> Fingerprint:
        """Collect the fields of ``config`` and the further settings ``more`` as JSON values."""
        values = {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()
        }
        return cls({**values, **more})

    def require_equal(self, recorded: dict[str, Any], run: str) -> None:
        """Raise InputError that names the first setting in which ``recorded`` differs."""
        for key in dict.fromkeys([*self.values, *recorded]):
            now, before = self.values.get(key), recorded.get(key)
            if now != before:
                raise InputError(
                    f"--resume {run}: {key} differs: the run has {_short(before)}, this command has {_short(now)}; "
                    "give the same value or another --out"
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
