"""What a run is asked to do, and the presets of model sizes."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from shoestring.core.errors import InputError


@dataclass(frozen=True)
class Preset:
    """Shape of a Llama-architecture model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    tied: bool = True  # input and output embedding are one matrix: sensible while they dominate the size


PRESETS = {
    "tiny": Preset(64, 2, 2, 2, 192),
    "mini": Preset(128, 4, 4, 4, 384),
    "small": Preset(256, 6, 4, 4, 768),
    "medium": Preset(512, 8, 8, 8, 1536),
    "base": Preset(768, 12, 12, 12, 2048),  # the size of GPT-2 small
    "large": Preset(1024, 24, 16, 16, 2816),
    "1b": Preset(2048, 22, 32, 4, 5632, tied=False),  # the shape of TinyLlama
}

# The choices of the command line, here without PyTorch.
SCHEDULES = ("constant", "linear", "cosine", "wsd")
DTYPES = ("fp32", "bf16")
MOST_THREADS = max(256, os.cpu_count() or 1)  # tens of thousands end the process
ESTIMATE_DTYPES = ("fp32", "bf16", "fp16")
DEVICES = ("cuda", "cpu")
QUANTIZE = ("nf4", "int4", "int8", "none")
OPTIMIZERS = ("adamw", "lion", "sgd", "ademamix", "schedule-free-adamw", "lamb", "adafactor", "came", "muon")
STATES = ("8bit", "4bit", "bf16", "fp32")
WEIGHTS = ("plain", "stochastic", "remainder")


@dataclass
class LoopConfig:
    """What the loop of both commands takes. Two runs with equal values (and data) give equal bits."""

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
    """`shoestring train`: a model from scratch."""

    preset: str = "small"
    vocab_size: int = 16384
    tokenizer: str | None = None


@dataclass
class FinetuneConfig(LoopConfig):
    """`shoestring finetune`: LoRA, QLoRA or all weights of an existing model."""

    model: str = ""
    full: bool = False
    quantize: str | None = "nf4"
    rank: int = 16
    alpha: float = 32.0
    target_modules: str | list[str] = "all-linear"
    pack: bool = True  # examples one after the other, where the model's attention is ours
    lr: float = 2e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)

    def check(self) -> None:
        """Raise InputError for options that do not go together; the command line checks each by itself."""
        # bitsandbytes' int8 layer rounds its input to 8 bits, too: another model, and no twin of ours. It has no int4.
        if self.plain and self.quantize not in (None, "nf4"):
            raise InputError(f"--quantize: expected nf4 | none with --plain, got {self.quantize}")


@dataclass
class Fingerprint:
    """What must be the same for a run to be continued bit for bit."""

    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: LoopConfig, **more: Any) -> Fingerprint:
        """Collect the fields of ``config`` and whatever else decides the run, as JSON values."""
        values = {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()
        }
        return cls({**values, **more})

    def require_equal(self, recorded: dict[str, Any], run: str) -> None:
        """Raise InputError that names the first field in which ``recorded`` differs."""
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
