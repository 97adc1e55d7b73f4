"""What a person chooses about an adapter. Every adapted layer keeps the options of each of its adapters."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

Names = str | Sequence[str]
# The base becomes what these leave of it, so that adapter and base together are what the base was.
CHANGES_BASE = ("pissa", "olora", "loftq")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where adapters go, by PEFT's rules.

    Args:
        target_modules: "all-linear" (of a transformers model without the output head, tied or not); a list of names, or of
            what names end with after a dot; or a regular expression for the whole name. None with target_parameters.
        exclude_modules: names, or a regular expression, of what is left out.
        layers_to_transform: with a list of target_modules: the numbers of the layers that take part.
        layers_pattern: what stands before the number in a layer's name; None is anything.
        modules_to_save: names of modules of which a copy is trained whole.
        bias: "none"; "all" or "lora_only" to train the biases of the model, or of the adapted layers, themselves: these
            are not kept aside, so disabling the adapter leaves them as trained.
    """

    target_modules: Names | None = "all-linear"
    exclude_modules: Names | None = None
    layers_to_transform: int | Sequence[int] | None = None
    layers_pattern: Names | None = None
    modules_to_save: Sequence[str] = ()
    bias: str = "none"
    BIASES: ClassVar[tuple[str, ...]] = ("none", "all", "lora_only")

    def __post_init__(self) -> None:
        for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
            value = getattr(self, name)
            object.__setattr__(self, name, _names(value))
        _expect(self.bias in self.BIASES, "bias", " or ".join(repr(name) for name in self.BIASES), self.bias)
        if self.layers_to_transform is not None and isinstance(self.target_modules, str):
            raise ValueError(
                "lora.apply: layers_to_transform: expected None unless target_modules is a list of names, received "
                f"{self.layers_to_transform!r}; put the numbers into the regular expression"
            )
        if self.layers_pattern and self.layers_to_transform is None:
            _expect(False, "layers_to_transform", "layer numbers, since layers_pattern is given", None)


@dataclass(frozen=True, kw_only=True)
class LoraOptions(Options):
    """LoRA (arXiv 2106.09685) and what builds on it.

    Args:
        rank: rows of lora_A and columns of lora_B.
        alpha: the low-rank product is multiplied by alpha / rank.
        rank_pattern, alpha_pattern: other values for the modules whose names end with what these regular expressions match.
        rslora: alpha / sqrt(rank) instead (arXiv 2312.03732).
        dora: a trained magnitude for each output (DoRA, arXiv 2402.09353). With dropout only what lora_A reads is dropped;
            PEFT runs the base on the dropped input, too: the same expectation for twice the products.
        dropout: probability of dropping an element of what lora_A reads, in training. Not for embeddings and experts.
        lora_bias: a bias with the low-rank product, multiplied by the scaling as that is.
        init: of lora_A, lora_B being zero: "default" (kaiming uniform, a = sqrt 5), "gaussian" (standard deviation
            1 / rank) or "eva" (as "default" until :func:`shoestring.lora.initialize_eva`). Of both, the base keeping the
            rest: "pissa" (arXiv 2404.02948; "pissa_niter_4": by a randomised SVD of 4 iterations), "olora" (arXiv
            2406.01775), "loftq" (arXiv 2310.08659; with ``quantize``).
        loftq_iterations: of quantising and decomposing in turn.
        target_parameters: names of parameters, as target_modules names modules: the stacked weights (experts, out, in) of
            mixtures of experts, or (experts, in, out) in a module with ``is_transposed``.
    """

    rank: int = 16
    alpha: float = 32
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0
    lora_bias: bool = False
    init: str = "default"
    loftq_iterations: int = 1
    target_parameters: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "target_parameters", _names(self.target_parameters))
        for rank in (self.rank, *self.rank_pattern.values()):
            _expect(
                isinstance(rank, int) and rank is not True and rank > 0,
                "rank",
                "an integer of at least 1",
                rank,
            )
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            _expect(math.isfinite(alpha), "alpha", "a finite number", alpha)
        _expect(0 <= self.dropout < 1, "dropout", "a probability in [0, 1)", self.dropout)
        known = ("default", "gaussian", "eva", *CHANGES_BASE)
        fits = isinstance(self.init, str) and (
            self.init in known or re.fullmatch(r"pissa_niter_[1-9]\d*", self.init)
        )
        names = ", ".join(repr(name) for name in known)
        _expect(bool(fits), "init", f"{names} or 'pissa_niter_N'", self.init)
        _expect(self.loftq_iterations > 0, "loftq_iterations", "at least 1", self.loftq_iterations)
        if self.dora and (self.lora_bias or self.changes_base):
            what = "lora_bias" if self.lora_bias else "init"
            _expect(False, what, "its default with dora", self.lora_bias if self.lora_bias else self.init)

    @property
    def scaling(self) -> float:
        """What the low-rank product is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def changes_base(self) -> bool:
        """True where the initialisation takes the adapter's part out of the base weight."""
        return self.init.split("_")[0] in CHANGES_BASE


@dataclass(frozen=True, kw_only=True)
class VeraOptions(Options):
    """VeRA (arXiv 2310.11454).

    Args:
        rank: rows of the shared vera_A.
        dropout: probability of dropping an element of what vera_A reads, in training.
        d_initial: what lambda_d starts with.
        seed: of the shared matrices.
        save_projection: write these into files too.
    """

    rank: int = 256
    dropout: float = 0.0
    d_initial: float = 0.1
    seed: int = 0
    save_projection: bool = True
    BIASES: ClassVar[tuple[str, ...]] = ("none", "all", "vera_only")
    # What of LoRA's options it never has.
    dora: ClassVar[bool] = False
    lora_bias: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect(isinstance(self.rank, int) and self.rank > 0, "rank", "an integer of at least 1", self.rank)
        _expect(0 <= self.dropout < 1, "dropout", "a probability in [0, 1)", self.dropout)


@dataclass(frozen=True, kw_only=True)
class IA3Options(Options):
    """IA3 (arXiv 2205.05638).

    Args:
        feedforward_modules: which of target_modules have their input multiplied, not their output; as target_modules names
            modules.
        feedforward: of a layer's own options: that it is one of these.
    """

    feedforward_modules: Names = ()
    feedforward: bool = False
    BIASES: ClassVar[tuple[str, ...]] = ("none",)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "feedforward_modules", _names(self.feedforward_modules))


@dataclass(frozen=True, kw_only=True)
class VirtualOptions(Options):
    """Trained tokens before a causal language model's input. What concerns modules is of no use to it."""

    target_modules: None = None
    tokens: int = 20
    BIASES: ClassVar[tuple[str, ...]] = ("none",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect(
            isinstance(self.tokens, int) and self.tokens > 0,
            "tokens",
            "an integer of at least 1",
            self.tokens,
        )
        for name in ("target_modules", "exclude_modules", "modules_to_save"):
            _expect(not getattr(self, name), name, "nothing with virtual tokens", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class PrefixOptions(VirtualOptions):
    """Prefix tuning (arXiv 2101.00190): keys and values of every layer.

    Args:
        tokens: length of the prefix.
        projection: made by two linear layers from tokens of one layer's size, in training; files have the result.
        hidden_size: between the two; None: as the tokens.
        init: "default" (normal) or "zero".
    """

    projection: bool = False
    hidden_size: int | None = None
    init: str = "default"

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect(self.init in ("default", "zero"), "init", "'default' or 'zero'", self.init)


@dataclass(frozen=True, kw_only=True)
class PromptOptions(VirtualOptions):
    """Prompt tuning (arXiv 2104.08691): embeddings before those of the input.

    Args:
        tokens: length of the prompt.
        init: "random" (normal), "vocabulary" (embeddings of tokens drawn from it), or token ids, repeated to the length.
    """

    init: str | Sequence[int] = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.init in ("random", "vocabulary") if isinstance(self.init, str) else len(self.init) > 0
        _expect(fits, "init", "'random', 'vocabulary' or token ids", self.init)


def _names(value: Any) -> Any:
    """A list of names without spaces around them, a set in order; anything else, such as a pattern, as it is."""
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    return type(value)(name.strip() for name in value) if isinstance(value, (list, tuple)) else value


def _expect(fits: bool, argument: str, expected: str, received: Any) -> None:
    if not fits:
        raise ValueError(f"lora.apply: {argument}: expected {expected}, received {received!r}")


def check_name(adapter_name: str) -> None:
    """Refuses names that cannot be a part of a parameter's name."""
    if not adapter_name or "." in adapter_name or hasattr(nn.ParameterDict, adapter_name):
        raise ValueError(
            "lora.apply: adapter_name: expected a name without dots that is no method of nn.ParameterDict, received "
            f"{adapter_name!r}"
        )
