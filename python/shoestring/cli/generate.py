"""`shoestring generate`: continue a prompt with a model, to see what it has learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shoestring.cli.config import GenerateConfig
from shoestring.core.errors import InputError
from shoestring.data.chat import render, stop_at_answers
from shoestring.data.encoding import Encoder
from shoestring.data.progress import working
from shoestring.data.tokenizer import load_tokenizer
from shoestring.files.read_file import read_json
from shoestring.files.safetensors_file import open_safetensors
from shoestring.training.run.device import DTYPES, find_device
from shoestring.training.run.models import check_model_directory, load_model, locate_model
from shoestring.training.run.positions import positions_of

# lowest temperature: dividing logits by less overflows, and the likeliest token is certain anyway
COLDEST = 1e-6


def generate(config: GenerateConfig) -> str:
    """Return the model's continuation of the prompt, or with ``chat`` its answer to the prompt."""
    if config.adapter is not None:
        check_adapter(config.adapter)
    device = find_device(config.device)
    folder = locate_model(config.model, config.trust_remote_code)
    tokenizer = load_tokenizer(folder, config.trust_remote_code)
    checked = check_model_directory(folder)
    model = load_model(
        checked, DTYPES[config.precision], trust_remote_code=config.trust_remote_code, device=device
    )
    if config.adapter is not None:
        from shoestring import lora

        try:
            lora.load_adapter(model, config.adapter, any_base=config.any_base)
        except (ValueError, RuntimeError, KeyError) as error:
            raise InputError(f"--adapter {config.adapter}: does not fit {config.model} ({error})") from None
    ids = _prompt(config, tokenizer)
    ids = ids or [tokenizer.eos_token_id]  # if the prompt is empty, the model continues the end-of-text token
    rows = model.get_input_embeddings().weight.shape[0]
    if max(ids) >= rows:
        raise InputError(
            f"{folder}: the tokenizer gives token {max(ids)}, the model's embedding has {rows} rows"
        )
    positions = positions_of(checked.fields)
    if positions is not None and len(ids) + config.max_new_tokens > positions.number:
        most = max(0, int(positions.number) - len(ids))
        raise InputError(
            f"--max-new-tokens {config.max_new_tokens}: expected at most {most} after a prompt of "
            f"{len(ids)} tokens, since {folder} has {positions.number:g} positions; give fewer, or a shorter prompt"
        )
    ends = stop_at_answers(model, tokenizer) if config.chat else []
    torch.manual_seed(config.seed)
    model.eval()
    sample = config.temperature > COLDEST
    options: dict[str, Any] = {"do_sample": sample}
    if sample:
        options |= {"temperature": config.temperature, "top_p": config.top_p}
    inputs = torch.tensor([ids], device=device)
    options |= {"max_new_tokens": config.max_new_tokens, "pad_token_id": tokenizer.eos_token_id}
    try:
        with torch.no_grad(), working("generating"):
            output = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **options)
    except (ValueError, TypeError, RuntimeError) as error:
        # raised for example if generation_config.json contains invalid values
        if isinstance(error, RuntimeError) and "probability tensor" not in str(error):
            raise
        raise InputError(f"{folder}: the model cannot generate text ({error})") from None
    written = output[0].tolist()
    if written[-1] in ends:
        written.pop()  # it may be no special token, which the text leaves out
    return _continuation(tokenizer, ids, written)


def _prompt(config: GenerateConfig, tokenizer: Any) -> list[int]:
    """Return the tokens of the prompt, which begin as those of an example of `finetune`."""
    encoder = Encoder(tokenizer)
    if not config.chat:
        return encoder.begun(encoder.ids([config.prompt])[0])
    message = {"role": "user", "content": config.prompt}
    ids = encoder.ids([render(tokenizer, [message], None, "--chat", ask=True).text])[0]
    return ids if tokenizer.chat_template else encoder.begun(ids)


def _continuation(tokenizer: Any, prompt: list[int], ids: list[int]) -> str:
    """Return the text that follows the prompt. Decoded alone, its first word would lose the space before it."""
    before, text = (tokenizer.decode(part, skip_special_tokens=True) for part in (prompt, ids))
    if not text.startswith(before):
        text, before = tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True), ""
    return str(text[len(before) :])


def check_adapter(folder: Path) -> None:
    """Check the two files of a PEFT adapter, before a model is loaded."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise InputError(f"--adapter {folder}: no {name} there; expected a PEFT adapter directory")
    read_json(folder / "adapter_config.json", str(folder / "adapter_config.json"))
    weights = folder / "adapter_model.safetensors"
    open_safetensors(weights, f"{weights}: not a valid safetensors file")
