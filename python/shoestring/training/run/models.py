"""Build or load the model of a training run and its loss function, fused or plain."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.errors import InputError
from shoestring.core.stacks import stacks_of
from shoestring.data.batches import IGNORE, packed_arguments
from shoestring.data.progress import working
from shoestring.data.tokenizer import quiet_transformers
from shoestring.integrations.transformers.attention import no_padding
from shoestring.integrations.transformers.load import load_dense, load_quantized, refuse_adapter
from shoestring.integrations.transformers.reader import read_config, stored_tensors
from shoestring.training.config import Preset
from shoestring.training.run.device import CPU
from shoestring.training.run.patch_lines import patch_lines
from shoestring.training.run.weights import weights_errors

# function (inputs, labels, items=1, **model_arguments) -> the sum of the losses of all labelled positions divided
# by ``items``, plus the terms of the model's loss that are no sums over tokens, such as that of a router
Loss = Callable[..., Tensor]

BALANCE = 0.01  # factor of the loss that balances the experts of a preset, as in the C++ program train_gpt
# files that are downloaded for a model on the Hub
WEIGHT_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]


def build_preset(
    preset: Preset,
    vocab_size: int,
    seq_len: int,
    end_of_text: int,
    *,
    experts: int = 0,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Any:
    """Build a randomly initialised Llama on ``device``, by default PyTorch's default device; with experts a Mixtral.

    Each of the experts has the size of the preset's MLP. The loss then has the loss that balances the experts.
    The weights are drawn from the global random generator of the device, so call ``torch.manual_seed`` first.
    """
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

    quiet_transformers()
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": preset.hidden,
        "intermediate_size": preset.mlp,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "max_position_embeddings": max(seq_len, 2048),
        "tie_word_embeddings": preset.tied,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text,
    }
    with nullcontext() if device is None else device:
        if not experts:
            return LlamaForCausalLM._from_config(LlamaConfig(**shape), dtype=dtype)
        config = MixtralConfig(
            **shape,
            num_local_experts=experts,
            num_experts_per_tok=top_k,
            sliding_window=None,
            output_router_logits=True,
            router_aux_loss_coef=BALANCE,
        )
        return MixtralForCausalLM._from_config(config, dtype=dtype)


def parameters_of_token(model: Any) -> int:
    """Return the number of parameters that a token uses: those of a mixture of experts count for its top_k alone."""
    top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    unused = sum(
        stack.numel() - stack.numel() // stack.shape[0] * min(top_k, stack.shape[0])
        for module in model.modules()
        if top_k is not None
        for _, stack in stacks_of(module)
    )
    total: int = sum(p.numel() for p in model.parameters()) - unused
    return total


def locate_model(name: str, trust_remote_code: bool = False, weights: bool = True) -> Path:
    """Return the local directory of a model: the path itself, or the snapshot of a Hugging Face Hub id.

    Without ``weights``, the snapshot has the configuration alone.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"--model {name}: expected a model directory, got a file")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) or name.endswith("/"):
        raise InputError(
            f"--model {name}: no such directory, and not the form of a Hugging Face Hub id (owner/name)"
        )
    from huggingface_hub import snapshot_download

    try:
        files = (WEIGHT_FILES if weights else ["config.json"]) + ["*.py"] * trust_remote_code
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:
        # The machine may be offline, the model missing or gated, or the disk full; report any error in one
        # line.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise InputError(
            f"--model {name}: no such directory, and the Hugging Face Hub did not return it "
            f"({type(error).__name__}: {reason})"
        ) from None


class ModelDirectory(NamedTuple):
    """A model directory whose files have been checked."""

    folder: Path
    fields: dict[str, Any]  # the fields of config.json

    @property
    def is_quantized(self) -> bool:
        """Whether the weights in the files are quantised already."""
        return self.fields.get("quantization_config") is not None


def check_model_directory(folder: Path) -> ModelDirectory:
    """Check config.json and every weights file of a model directory, which must not hold an adapter, too.

    This check allocates no weights. The safetensors reader checks header size, offsets, overlaps and file
    length. Errors of the reader are converted to InputErrors of one line.
    """
    try:
        fields = read_config(folder)
        refuse_adapter(folder)
        stored_tensors(folder)
    except ValueError as error:
        raise InputError(f"--model {error}") from None
    return ModelDirectory(folder, fields)


def load_model(
    checked: ModelDirectory,
    dtype: torch.dtype,
    quantize: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device = CPU,
    to: str | None = None,
    keep: int = 0,
    double_quant: bool = False,
    tiles: Mapping[str, int] | None = None,
) -> Any:
    """Load a causal language model; every weight must be present and fit config.json.

    Tensors are read one by one and copied to ``device``. With ``quantize``, or for a checkpoint that is already
    quantised, each linear weight is quantised as soon as it is read, and the weights of each block then leave
    for ``to``, as in ``load_quantized``, those of ``tiles`` tile by tile. A dense model stays on the device; ``offload_weights`` may follow. Code in the directory runs only with
    ``trust_remote_code``.
    """
    folder, quantized = checked.folder, checked.is_quantized
    quiet_transformers()
    with working(f"loading {folder}"), weights_errors(to):
        try:
            if quantize is not None or quantized:
                return load_quantized(
                    folder, quant_type=quantize, dtype=dtype, device=device, trust_remote_code=trust_remote_code,
                    to=to, keep=keep, double_quant=double_quant, tiles=tiles,
                )  # fmt: skip
            return load_dense(folder, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise InputError(error) from None


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters."""
    return next(model.parameters()).device


def plain_loss(model: Any) -> Loss:
    """Return a loss function that computes all logits in fp32 and sums the cross-entropies of the labels."""

    def loss(inputs: Tensor, labels: Tensor, items: float = 1, **more: Any) -> Tensor:
        output = model(input_ids=inputs, use_cache=False, **more)
        total = F.cross_entropy(
            output.logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        router = getattr(output, "aux_loss", None)
        if not isinstance(router, Tensor):
            return total / items
        return total / items + _router_factor(model) * router.to(total.device)

    return loss


def _router_factor(model: Any) -> float:
    """Return the factor of the router's loss in the loss of a model that computes one."""
    owners = (model, model.config, model.config.get_text_config())
    factors = [getattr(owner, "router_aux_loss_coef", None) for owner in owners]
    router_factor = next((factor for factor in factors if factor is not None), None)
    if router_factor is None:
        raise InputError(
            "--model: expected router_aux_loss_coef in config.json of a model that computes a loss of its router, "
            "got none; set output_router_logits to false there"
        )
    return float(router_factor)


def fused_loss(model: Any, workspace_mb: int, tell: Callable[[str], object] = lambda line: None) -> Loss:
    """Patch the model and return a loss function that sums cross-entropies without storing logits.

    The patch also applies to an adapter that is added to the model later. ``tell`` gets two lines: what is patched,
    and what is left to PyTorch.
    """
    from shoestring.integrations.transformers import patch

    mask: dict[str, Any] = {}  # the argument that says that a batch has no padding

    def loss(inputs: Tensor, labels: Tensor, items: float = 1, **more: Any) -> Tensor:
        # The labels are already shifted by one token. The model divides the sum of all token losses by
        # num_items_in_batch, and then adds terms that are no sums over tokens.
        labels = labels.contiguous()
        options = {"shift_labels": labels, "num_items_in_batch": items, "use_cache": False, **mask, **more}
        result: Tensor = model(input_ids=inputs, labels=labels, **options).loss
        return result

    try:
        report = patch(model, logits=False, workspace_mb=workspace_mb)  # evaluation needs the loss only
        _check_same(loss, plain_loss(model), model)
    except (TypeError, ValueError) as error:
        raise InputError(f"--model: {error}; use --baseline for this architecture") from None
    if getattr(model.config, "_attn_implementation", None) == "shoestring":
        mask = {"attention_mask": no_padding(device_of(model))}
        try:
            _check_same(loss, plain_loss(model), model)
        except (TypeError, ValueError, RuntimeError, IndexError):
            mask = {}  # the model reads the mask itself
    for line in patch_lines(model, report):
        tell(line)
    return loss


def _check_same(fused: Loss, plain: Loss, model: Any) -> None:
    """Raise ValueError if the fused loss and the plain loss of a few tokens differ.

    The losses differ if the model's code drops keyword arguments instead of passing them to its loss
    function. The sum of the token losses is divided by a number other than that of the tokens, so that a model
    which takes the mean itself differs, too.
    """
    tokens = torch.arange(8, device=device_of(model))[None] % model.get_input_embeddings().weight.shape[0]
    training = model.training
    model.eval()
    with torch.no_grad():
        expected, received = (loss(tokens, tokens.flip(1), items=3).item() for loss in (plain, fused))
    model.train(training)
    if not abs(expected - received) <= 0.02 * abs(expected):
        raise ValueError(
            f"expected a loss of {expected:.4f} of {type(model).__name__}, received {received:.4f}"
        )


def can_pack(model: Any) -> bool:
    """Return whether the model can compute several examples packed into one row independently.

    This requires that the model uses shoestring's attention, passes the arguments with the start of each example on to
    it, and mixes tokens by nothing else, such as a convolution or a state. The test packs two examples into one row.

    1. The second example's logits must be those of the example alone, within rounding.
    2. They must keep their bits when the tokens of the first example change. This finds what rounding hides in 16 bits,
       and what small weights hide. Experts multiply other numbers of tokens then, so their last bits may change.
    """
    if getattr(model.config, "_attn_implementation", None) != "shoestring":
        return False
    first, second = 9, 7
    count = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, 1 + first + second, device=device_of(model))[None] % count
    changed_tokens = tokens.clone()
    changed_tokens[:, :first] = (tokens[:, :first] * 3 + 5) % count
    alone = tokens[:, first:]
    together = {
        name: value.to(tokens.device) if isinstance(value, Tensor) else value
        for name, value in packed_arguments([first, second]).items()
    }
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            packed, changed = (
                model(input_ids=row, use_cache=False, **together).logits[:, first:]
                for row in (tokens, changed_tokens)
            )
            expected, longer = (
                model(input_ids=row, use_cache=False).logits[:, :second]
                for row in (alone, torch.cat([alone, alone], 1))
            )
            mixed = model(input_ids=tokens, use_cache=False).logits[:, first:]
    except (TypeError, ValueError, RuntimeError):
        # the model does not accept the arguments for packed examples
        return False
    finally:
        model.train(training)
    epsilon, size = torch.finfo(expected.dtype).eps, expected.float().norm()

    def apart(a: Tensor, b: Tensor) -> Tensor:
        return torch.dist(a.float(), b.float())

    if not apart(packed, expected) <= torch.minimum(1000 * epsilon * size, 0.1 * apart(mixed, expected)):
        return False
    rounding = torch.maximum(8 * epsilon * size, 4 * apart(longer, expected))
    return torch.equal(packed, changed) or (
        not any(isinstance(module, nn.Conv1d) for module in model.modules())
        and bool(apart(packed, changed) <= rounding)
    )
