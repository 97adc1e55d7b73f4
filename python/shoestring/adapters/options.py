"""Option classes of adapters. Every adapted layer keeps the options of each of its adapters."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from shoestring.files.read_file import is_name, shown

Names = str | Sequence[str]
# Initialisations that subtract the adapter's initial product from the base weight. Base and adapter together
# then equal the original weight.
CHANGES_BASE = ("pissa", "olora", "loftq")
# Names of the modules that PEFT trains as a whole for a task, since a pretrained model lacks weights for them.
HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
# maximum length of an adapter's name in UTF-8
MOST_BYTES = 200
TASKS = ("CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION", *HEADS)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that all kinds of adapters have. They select modules by the rules of PEFT.

    Args:
        target_modules: the modules that get an adapter. "all-linear" selects all linear layers, in a
            transformers model except the output head. Otherwise a list of names, or of endings of names after
            a dot; or a regular expression for the whole name. None if only target_parameters are adapted.
        exclude_modules: names, or a regular expression, of modules that get no adapter.
        layers_to_transform: numbers of the layers whose modules get an adapter; needs a list in
            target_modules.
        layers_pattern: the part of a module's name before the layer number; None is any.
        modules_to_save: names, or any endings of names, of modules of which a copy is trained as a whole.
        bias: "none" to train no biases of the model; "all" to train all of them; or "lora_only" (for VeRA
            "vera_only") to train the biases of layers with adapters. The biases of the base are changed in
            place, so they keep their trained values when the adapter is disabled.
        task_type: None, or PEFT's name of the task: "CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION",
            "SEQ_CLS", "TOKEN_CLS" or "QUESTION_ANS". The last three add the model's head to modules_to_save:
            modules with names that end with classifier or score, or for "QUESTION_ANS" with qa_outputs.
    """

    target_modules: Names | None = "all-linear"
    exclude_modules: Names | None = None
    layers_to_transform: int | Sequence[int] | None = None
    layers_pattern: Names | None = None
    modules_to_save: Sequence[str] = ()
    bias: str = "none"
    task_type: str | None = None
    BIASES: ClassVar[tuple[str, ...]] = ("none", "all", "lora_only")

    def __post_init__(self) -> None:
        for name in ("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"):
            value = getattr(self, name)
            object.__setattr__(self, name, _names(value))
        _expect(self.bias in self.BIASES, "bias", " or ".join(repr(name) for name in self.BIASES), self.bias)
        tasks = ", ".join(map(repr, TASKS))
        _expect(self.task_type in (None, *TASKS), "task_type", f"None, {tasks}", self.task_type)
        if self.layers_to_transform is not None and isinstance(self.target_modules, str):
            raise ValueError(
                "lora.apply: layers_to_transform: expected None unless target_modules is a list of names, received "
                f"{self.layers_to_transform!r}; put the numbers into the regular expression"
            )
        if self.layers_pattern and self.layers_to_transform is None:
            _expect(False, "layers_to_transform", "layer numbers, since layers_pattern is given", None)

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the modules that ``task_type`` adds to modules_to_save. A model may lack some of them."""
        return HEADS.get(self.task_type or "", ())


@dataclass(frozen=True, kw_only=True)
class LoraOptions(Options):
    """Options of LoRA (arXiv 2106.09685) and its variants.

    Args:
        rank: number of rows of lora_A and of columns of lora_B.
        alpha: the low-rank product is multiplied by alpha / rank.
        rank_pattern, alpha_pattern: other ranks and alphas, by regular expression. An expression must match
            the name of a module or its ending after a dot.
        rslora: multiply the low-rank product by alpha / sqrt(rank) instead of alpha / rank (arXiv
            2312.03732).
        dora: train a magnitude for each output (DoRA, arXiv 2402.09353). Dropout applies only to the input of
            lora_A. PEFT applies dropout to the input of the base weight too, which gives the same expected
            output but needs twice the matrix products.
        dropout: probability of dropping an element of the input of lora_A, in training. Not supported for
            experts; embeddings ignore it.
        lora_bias: train a bias that is added to the low-rank product and multiplied by the same scaling.
        init: how lora_A and lora_B are initialised, see below.
        loftq_iterations: number of iterations of "loftq". Each iteration quantises the weight and computes an
            SVD of the quantisation error.
        target_parameters: names of parameters, by the same rules as target_modules. The parameters must be
            the stacked weights of a mixture of experts, (experts, out, in), or (experts, in, out) in a module
            with ``is_transposed``.
        trainable_token_indices: tokens whose rows in the embedding are trained: a list of token ids for the
            model's input embedding, or a dict from names of modules to such lists. Layers whose weight is
            tied to the input embedding use the same rows.
        ensure_weight_tying: keep the copies of an embedding and of the modules that are tied to it tied, if
            modules_to_save names one of them; and refuse different trainable_token_indices for them. It has
            no effect on a model without tied modules.

    These values of ``init`` set lora_B to zero and initialise lora_A:

    - "default": kaiming uniform with a = sqrt(5);
    - "gaussian": normal with standard deviation 1 / rank;
    - "eva": like "default", until :func:`shoestring.lora.initialize_eva` is called.

    These values make both matrices random:

    - "random" (PEFT's False): kaiming uniform with a = sqrt(5), so the adapter changes the output at once;
    - "orthogonal": a product of zero up to rounding, from the rows of an orthogonal matrix. The rank must be
      even. Linear layers alone; embeddings are initialised as with "default".

    These values initialise both matrices from the base weight, and subtract their product from it:

    - "pissa" (arXiv 2404.02948); "pissa_niter_4" uses a randomised SVD with 4 iterations;
    - "olora" (arXiv 2406.01775);
    - "loftq" (arXiv 2310.08659), which needs ``quantize``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        >>> options = shoestring.lora.LoraOptions(rank=4, alpha=8, target_modules=["2"], dora=True)
        >>> model = shoestring.lora.apply(model, options)
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['2.lora_A.default', '2.lora_B.default', '2.lora_magnitude_vector.default']
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
    trainable_token_indices: Sequence[int] | Mapping[str, Sequence[int]] = ()
    ensure_weight_tying: bool = False

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
        known = ("default", "gaussian", "eva", "random", "orthogonal", *CHANGES_BASE)
        fits = isinstance(self.init, str) and (
            self.init in known or re.fullmatch(r"pissa_niter_[1-9]\d*", self.init)
        )
        names = ", ".join(repr(name) for name in known)
        _expect(bool(fits), "init", f"{names} or 'pissa_niter_N'", self.init)
        _expect(self.loftq_iterations > 0, "loftq_iterations", "at least 1", self.loftq_iterations)
        if self.init.startswith("pissa") or self.init == "loftq":
            # the square roots of the singular values / scaling are the initial values
            low = [alpha for alpha in (self.alpha, *self.alpha_pattern.values()) if alpha <= 0]
            _expect(not low, "alpha", f"a positive number with init {self.init!r}", low[0] if low else None)
        if self.init == "orthogonal":
            odd = [rank for rank in (self.rank, *self.rank_pattern.values()) if rank % 2]
            _expect(not odd, "rank", "an even number with init 'orthogonal'", odd[0] if odd else None)
            _expect(not self.lora_bias, "lora_bias", "False with init 'orthogonal'", self.lora_bias)
        if self.dora and (self.lora_bias or self.changes_base):
            what = "lora_bias" if self.lora_bias else "init"
            _expect(False, what, "its default with dora", self.lora_bias if self.lora_bias else self.init)

    @property
    def scaling(self) -> float:
        """The factor of the low-rank product, alpha / rank, or alpha / sqrt(rank) if ``rslora`` is set."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def starts_at_zero(self) -> bool:
        """Whether the low-rank product is exactly zero at first, or is subtracted from the base weight."""
        return self.init not in ("random", "orthogonal")

    @property
    def changes_base(self) -> bool:
        """Whether the initialisation subtracts the initial low-rank product from the base weight."""
        return self.init.split("_")[0] in CHANGES_BASE


@dataclass(frozen=True, kw_only=True)
class TokenOptions(LoraOptions):
    """Options of one layer with trained tokens: those of its adapter, and the layer's own.

    Args:
        indices: the trained rows of the layer's weight.
        tied_to: name of the layer that holds these rows; None if the layer itself does.
    """

    indices: tuple[int, ...] = ()
    tied_to: str | None = None


@dataclass(frozen=True, kw_only=True)
class VeraOptions(Options):
    """Options of VeRA (arXiv 2310.11454), which trains vectors around two frozen matrices that layers share.

    Args:
        rank: number of rows of the shared matrix vera_A.
        dropout: probability of dropping an element of the input of vera_A, in training.
        d_initial: initial value of lambda_d.
        seed: seed of the random shared matrices vera_A and vera_B.
        save_projection: whether files contain the shared matrices.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        >>> model = shoestring.lora.apply(model, shoestring.lora.VeraOptions(rank=16, seed=1))
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
        72
    """

    rank: int = 256
    dropout: float = 0.0
    d_initial: float = 0.1
    seed: int = 0
    save_projection: bool = True
    BIASES: ClassVar[tuple[str, ...]] = ("none", "all", "vera_only")
    # VeRA does not have these two options of LoRA, but VeraLinear inherits code from LoraLinear that reads
    # them.
    dora: ClassVar[bool] = False
    lora_bias: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect(isinstance(self.rank, int) and self.rank > 0, "rank", "an integer of at least 1", self.rank)
        _expect(0 <= self.dropout < 1, "dropout", "a probability in [0, 1)", self.dropout)


@dataclass(frozen=True, kw_only=True)
class IA3Options(Options):
    """Options of IA3 (arXiv 2205.05638), which multiplies inputs or outputs of layers by trained vectors.

    Args:
        feedforward_modules: the modules among target_modules whose input is multiplied instead of their
            output; given by the same rules as target_modules.
        feedforward: do not set. Each layer has its own copy of the options, in which feedforward says whether
            the layer is one of feedforward_modules.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        >>> options = shoestring.lora.IA3Options(target_modules=["0", "2"], feedforward_modules=["2"])
        >>> model = shoestring.lora.apply(model, options)
        >>> [tuple(p.shape) for p in model.parameters() if p.requires_grad]
        [(32, 1), (1, 32)]
    """

    feedforward_modules: Names = ()
    feedforward: bool = False
    BIASES: ClassVar[tuple[str, ...]] = ("none",)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "feedforward_modules", _names(self.feedforward_modules))


@dataclass(frozen=True, kw_only=True)
class VirtualOptions(Options):
    """Options that prefix and prompt tuning share. An option that selects modules raises an error."""

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
        _expect(
            not self.heads and self.task_type != "SEQ_2_SEQ_LM",
            "task_type",
            "a causal language model with virtual tokens",
            self.task_type,
        )
        for name in ("target_modules", "exclude_modules", "modules_to_save"):
            _expect(not getattr(self, name), name, "nothing with virtual tokens", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class PrefixOptions(VirtualOptions):
    """Options of prefix tuning (arXiv 2101.00190): trained keys and values before the input, in every layer.

    Args:
        tokens: length of the prefix.
        projection: whether two linear layers compute the prefix from trained tokens with fewer features, as
            many as the keys of one layer have. Files contain the computed prefix.
        hidden_size: number of features between the two linear layers; None: as many as the trained tokens
            have.
        init: "default" (normal) or "zero".

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> options = shoestring.lora.PrefixOptions(tokens=4)
        >>> model = shoestring.lora.apply(LlamaForCausalLM(config), options)
        >>> [tuple(p.shape) for p in model.parameters() if p.requires_grad]
        [(4, 128)]
    """

    projection: bool = False
    hidden_size: int | None = None
    init: str = "default"

    def __post_init__(self) -> None:
        super().__post_init__()
        _expect(self.init in ("default", "zero"), "init", "'default' or 'zero'", self.init)


@dataclass(frozen=True, kw_only=True)
class PromptOptions(VirtualOptions):
    """Options of prompt tuning (arXiv 2104.08691): trained embeddings before those of the input.

    Args:
        tokens: length of the prompt.
        init: "random" (normal), "vocabulary" (the embeddings of randomly drawn tokens), or a list of token
            ids. The list is repeated or cut to the length of the prompt.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> options = shoestring.lora.PromptOptions(tokens=4, init="vocabulary")
        >>> model = shoestring.lora.apply(LlamaForCausalLM(config), options)
        >>> [tuple(p.shape) for p in model.parameters() if p.requires_grad]
        [(4, 64)]
    """

    init: str | Sequence[int] = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.init in ("random", "vocabulary") if isinstance(self.init, str) else len(self.init) > 0
        _expect(fits, "init", "'random', 'vocabulary' or token ids", self.init)


def _names(value: Any) -> Any:
    """Strip spaces from the names in a list, and sort a set of names; return any other value unchanged."""
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    return type(value)(name.strip() for name in value) if isinstance(value, (list, tuple)) else value


def _expect(fits: bool, argument: str, expected: str, received: Any) -> None:
    if not fits:
        raise ValueError(f"lora.apply: {argument}: expected {expected}, received {received!r}")


def check_name(adapter_name: str) -> None:
    """Raise a ValueError if an adapter's name cannot be a part of a parameter's name, or a folder's name."""
    # save_adapter writes the adapter into a folder of this name.
    folder = is_name(adapter_name) and not set("./\\") & set(adapter_name)
    if not adapter_name or not folder or len(os.fsencode(adapter_name)) > MOST_BYTES:
        raise ValueError(
            f"lora.apply: adapter_name: expected a name without dots, slashes and control characters, of at most "
            f"{MOST_BYTES} bytes, received {shown(adapter_name)}"
        )
    if hasattr(nn.ParameterDict(), adapter_name):
        raise ValueError(
            f"lora.apply: adapter_name: expected a name that is no method of nn.ParameterDict, received {adapter_name!r}"
        )
