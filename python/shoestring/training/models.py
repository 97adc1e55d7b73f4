"""Build or load the model of a training run and its loss function, fused or plain."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoestring.core.errors import InputError
from shoestring.data.batches import IGNORE, packed_arguments
from shoestring.data.progress import working
from shoestring.data.tokenizer import quiet_transformers
from shoestring.integrations.transformers.load import OtherTensorsError, load_quantized
from shoestring.integrations.transformers.reader import read_config, stored_tensors
from shoestring.integrations.transformers.remote_code import why_not_loaded
from shoestring.training.config import Preset

# (inputs, labels, **model_arguments) -> sum of the losses over all labelled positions
Loss = Callable[..., Tensor]

WEIGHT_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]  # downloaded for a Hub model


def build_llama(preset: Preset, vocab_size: int, seq_len: int, end_of_text: int) -> Any:
    """Build a randomly initialised fp32 Llama.

    It draws from PyTorch's global generator, so seed that first.
    """
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    quiet_transformers()
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=preset.hidden,
        intermediate_size=preset.mlp,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        max_position_embeddings=max(seq_len, 2048),
        tie_word_embeddings=preset.tied,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )
    return LlamaForCausalLM(config)


def locate_model(name: str, trust_remote_code: bool = False) -> Path:
    """Return the local directory of a model: the path itself, or the snapshot of a Hugging Face Hub id."""
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
        return Path(snapshot_download(name, allow_patterns=WEIGHT_FILES + ["*.py"] * trust_remote_code))
    except Exception as error:  # offline, missing, gated or disk full: report each of them in one line
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise InputError(
            f"--model {name}: no such directory, and the Hugging Face Hub did not give it "
            f"({type(error).__name__}: {reason})"
        ) from None


def check_model_directory(folder: Path) -> dict[str, tuple[int, ...]]:
    """Check config.json and every weight file; return the shape of each stored tensor.

    This check allocates no weights. The safetensors reader checks header size, offsets, overlaps and file
    length. Its errors become one-line InputErrors.
    """
    try:
        read_config(folder)
        return {name: tensor.shape for name, tensor in stored_tensors(folder).items()}
    except ValueError as error:
        raise InputError(f"--model {error}") from None


def is_quantized(folder: Path) -> bool:
    """Return True if the weights of the checkpoint are already quantised."""
    return read_config(folder).get("quantization_config") is not None


def load_model(
    folder: Path, dtype: torch.dtype, quantize: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load a causal language model from a local directory; every weight must be present and fit config.json.

    With ``quantize``, or for a checkpoint that is already quantised, each linear weight is quantised as soon
    as it is read. If only transformers can map the tensor names in the files, the whole model is loaded first
    and stays dense. Code in the directory runs only with ``trust_remote_code``.
    """
    stored = check_model_directory(folder)
    quiet_transformers()
    with working(f"loading {folder}"):
        return _load(folder, dtype, quantize, trust_remote_code, stored)


def _load(
    folder: Path,
    dtype: torch.dtype,
    quantize: str | None,
    trust_remote_code: bool,
    stored: dict[str, tuple[int, ...]],
) -> Any:
    if quantize is not None or is_quantized(folder):
        try:
            return load_quantized(
                folder, quant_type=quantize, dtype=dtype, trust_remote_code=trust_remote_code
            )
        except OtherTensorsError as error:
            if is_quantized(folder):
                raise InputError(error) from None
        except ValueError as error:
            raise InputError(error) from None
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            expected = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            ).state_dict()
    except Exception as error:
        raise InputError(
            f"{folder}: config.json does not describe a causal language model ({why_not_loaded(error)})"
        ) from None
    for key, tensor in expected.items():
        if key in stored and stored[key] != tuple(tensor.shape):
            raise InputError(
                f"{folder}: {key} has shape {list(stored[key])} in the weights, "
                f"but config.json asks for {list(tensor.shape)}"
            )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        model, info = loaded
    except Exception as error:
        raise InputError(f"{folder}: the weights cannot be loaded ({why_not_loaded(error)})") from None
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"{folder}: {len(missing)} weight(s) of the architecture are missing, the first is {missing[0]}"
        )
    return model


def plain_loss(model: Any) -> Loss:
    """Return a loss that sums cross-entropies over the full logits in fp32, like plain PyTorch."""

    def loss(inputs: Tensor, labels: Tensor, **more: Any) -> Tensor:
        logits = model(input_ids=inputs, use_cache=False, **more).logits
        return F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )

    return loss


def fused_loss(model: Any, workspace_mb: int) -> Loss:
    """Patch the model permanently and return a loss that computes the same sum without storing logits.

    The patch also covers an adapter that is added to the model later.
    """
    from shoestring.integrations.transformers import patch

    def loss(inputs: Tensor, labels: Tensor, **more: Any) -> Tensor:
        # The labels are already shifted. With num_items_in_batch=1, the loss is the sum of all losses.
        labels = labels.contiguous()
        options = {"shift_labels": labels, "num_items_in_batch": 1, "use_cache": False, **more}
        result: Tensor = model(input_ids=inputs, labels=labels, **options).loss
        return result

    try:
        patch(model, workspace_mb=workspace_mb)
        _check_same(loss, plain_loss(model), model)
    except (TypeError, ValueError) as error:
        raise InputError(f"--model: {error}; use --plain for this architecture") from None
    return loss


def _check_same(fused: Loss, plain: Loss, model: Any) -> None:
    """Raise ValueError if fused and plain loss differ on a few tokens.

    They differ if the model's architecture does not pass all arguments on to its loss.
    """
    tokens = torch.arange(8)[None] % model.get_input_embeddings().weight.shape[0]
    training = model.training
    model.eval()
    with torch.no_grad():
        expected, received = plain(tokens, tokens.flip(1)).item(), fused(tokens, tokens.flip(1)).item()
    model.train(training)
    if not abs(expected - received) <= 0.02 * abs(expected):
        raise ValueError(
            f"expected a loss of {expected:.4f} of {type(model).__name__}, received {received:.4f}"
        )


def can_pack(model: Any) -> bool:
    """Return whether the model keeps the packed examples of one row apart.

    The model must use shoestring's attention and pass on the arguments that say where each example begins.
    The test packs two examples. Their logits must be much closer to the logits of separate examples than
    those of a row without these arguments.
    """
    if getattr(model.config, "_attn_implementation", None) != "shoestring":
        return False
    tokens = torch.arange(12)[None] % model.get_input_embeddings().weight.shape[0]
    alone = [tokens[:, :7], tokens[:, 7:]]
    together = packed_arguments([part.shape[1] for part in alone])
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            expected = torch.cat([model(input_ids=part, use_cache=False).logits for part in alone], 1)
            packed = model(input_ids=tokens, use_cache=False, **together).logits
            mixed = model(input_ids=tokens, use_cache=False).logits
    except (TypeError, ValueError, RuntimeError):  # the model does not accept these arguments
        return False
    finally:
        model.train(training)
    return bool((packed - expected).norm() < 0.1 * (mixed - expected).norm())
