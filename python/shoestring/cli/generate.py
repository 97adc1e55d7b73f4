"""`shoestring generate`: continue a prompt with a model, to see what it has learnt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoestring.core.errors import InputError
from shoestring.data.examples import DEFAULT_CHAT_TEMPLATE, beginning
from shoestring.data.progress import working
from shoestring.data.tokenizer import encode_batch, load_tokenizer
from shoestring.files.read_file import read_json
from shoestring.training.models import load_model, locate_model

# lowest temperature: dividing logits by less overflows, and the likeliest token is certain anyway
COLDEST = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; temperature 0 takes the likeliest token.

    The command line checks the ranges.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


def generate(
    name: str,
    adapter: Path | None,
    prompt: str,
    sampling: Sampling,
    chat: bool,
    trust_remote_code: bool = False,
) -> str:
    """Return the model's continuation of ``prompt``, or with ``chat`` its answer to ``prompt``."""
    if adapter is not None:
        check_adapter(adapter)
    folder = locate_model(name, trust_remote_code)
    tokenizer = load_tokenizer(folder, trust_remote_code)
    model = load_model(folder, torch.float32, trust_remote_code=trust_remote_code)
    if adapter is not None:
        from shoestring import lora

        try:
            lora.load_adapter(model, adapter)
        except (ValueError, RuntimeError, KeyError) as error:
            raise InputError(f"--adapter {adapter}: does not fit {name} ({error})") from None
    if chat:
        template = tokenizer.chat_template or DEFAULT_CHAT_TEMPLATE
        message = {"role": "user", "content": prompt}
        try:
            text = tokenizer.apply_chat_template(
                [message], chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a chat template may raise any exception
            raise InputError(
                f"--chat: the chat template refuses the prompt ({type(error).__name__}: {error})"
            ) from None
        ids = encode_batch(tokenizer, [text])[0]
    else:
        ids = beginning(tokenizer) + encode_batch(tokenizer, [prompt])[0]
    ids = ids or [tokenizer.eos_token_id]  # an empty prompt continues the end-of-text token
    rows = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= rows:
        raise InputError(
            f"{folder}: the tokenizer gives token {max(ids)}, the model's embedding has {rows} rows"
        )
    torch.manual_seed(sampling.seed)
    model.eval()
    sample = sampling.temperature > COLDEST
    options: dict[str, Any] = {"do_sample": sample}
    if sample:
        options |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
    inputs = torch.tensor([ids])
    options |= {"max_new_tokens": sampling.max_new_tokens, "pad_token_id": tokenizer.eos_token_id}
    try:
        with torch.no_grad(), working("generating"):
            output = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **options)
    except (ValueError, TypeError, RuntimeError) as error:
        # for example, invalid values in generation_config.json
        if isinstance(error, RuntimeError) and "probability tensor" not in str(error):
            raise
        raise InputError(f"{folder}: the model cannot generate text ({error})") from None
    result: str = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    return result


def check_adapter(folder: Path) -> None:
    """Check the two files of a PEFT adapter, before a model is loaded."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise InputError(f"--adapter {folder}: no {name} there; expected a PEFT adapter directory")
    read_json(folder / "adapter_config.json", str(folder / "adapter_config.json"))
    from safetensors import safe_open

    try:
        with safe_open(folder / "adapter_model.safetensors", "pt") as stored:
            stored.keys()
    except Exception as error:
        raise InputError(
            f"{folder / 'adapter_model.safetensors'}: not a sound safetensors file ({error})"
        ) from None
