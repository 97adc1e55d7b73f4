"""Prefix tuning and prompt tuning: trained tokens before the input of a language model."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.adapters.options import PrefixOptions, PromptOptions, VirtualOptions
from shoestring.core.save_pretrained import watch


class VirtualTokens(nn.Module):
    """The trained tokens of a transformers language model, and the hook that puts them before its input.

    - Prefix (arXiv 2101.00190): ``embedding.<name>`` is (tokens, 2 * layers * features), the keys and values
      of each layer, which are put into the key-value cache. ``features`` is the size of one token's keys in
      one layer.
    - Prefix with projection: ``embedding.<name>`` is (tokens, features), and ``transform.<name>`` computes
      the prefix.
    - Prompt (arXiv 2104.08691): ``embedding.<name>`` is (tokens, hidden size): embeddings that are put before
      those of the input. The model's output then has positions for the prompt tokens too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.transform = nn.ParameterDict(), nn.ModuleDict()
        self.adapters: dict[str, Any] = {}
        self.active: tuple[str, ...] = ()
        self.enabled = True
        self.rows = None

    def values(self, name: str) -> Tensor:
        """Return the virtual tokens in the shape that files have.

        The shape is (tokens, 2 * layers * features) for a prefix and (tokens, hidden size) for a prompt.
        """
        tokens = self.embedding[name]
        result: Tensor = self.transform[name](tokens) if name in self.transform else tokens
        return result

    def tensors(self, name: str) -> dict[str, nn.Parameter]:
        """Return the trained parameters of an adapter, by name."""
        if name not in self.adapters:
            return {}
        more = dict(self.transform[name].named_parameters()) if name in self.transform else {}
        return {"embedding": self.embedding[name], **more}

    def add(self, name: str, options: VirtualOptions, values: Tensor, transform: nn.Module | None) -> None:
        """Add an adapter. If one with the same name and shape exists, copy the new values into its tensor."""
        existing = self.embedding.get(name)
        if existing is not None and existing.shape == values.shape:
            existing.detach().copy_(values)
        else:
            self.embedding[name] = nn.Parameter(values)
        if name in self.transform:
            del self.transform[name]
        if transform is not None:
            self.transform[name] = transform
        self.adapters[name] = options

    def remove(self, name: str) -> None:
        """Remove the virtual tokens and the options of an adapter."""
        del self.embedding[name], self.adapters[name]
        if name in self.transform:
            del self.transform[name]

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the model: add the active adapter's tokens to the arguments of its forward.

        Raises:
            ValueError: the adapter is a prefix and the model uses gradient checkpointing.
        """
        names = [name for name in self.active if name in self.adapters] if self.enabled else []
        if not names:
            return None
        # Convert positional arguments to keyword arguments. The call may pass fewer positional arguments than
        # forward has parameters.
        kwargs = dict(zip(inspect.signature(model.forward).parameters, args)) | kwargs
        options, values = self.adapters[names[0]], self.values(names[0])
        ids = kwargs.get("input_ids")
        read = kwargs["inputs_embeds"] if ids is None else ids
        batch, count = read.shape[0], options.tokens
        cache = kwargs.get("past_key_values")
        # During generation, only the first forward call adds the virtual tokens. Later calls find them in the
        # key-value cache.
        begins = cache is None or cache.get_seq_length() == 0
        mask = kwargs.get("attention_mask")
        if mask is not None:
            kwargs["attention_mask"] = torch.cat([mask.new_ones(batch, count), mask], 1)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"] + count
        # The caller's cache_position does not count the virtual tokens. Without it, the model derives the
        # positions from the length of the key-value cache.
        kwargs.pop("cache_position", None)
        if not begins:
            return (), kwargs
        if isinstance(options, PrefixOptions):
            if getattr(model, "is_gradient_checkpointing", False) and model.training:
                raise ValueError(
                    "lora.VirtualTokens: model: expected no gradient checkpointing with a prefix, since transformers drops "
                    "the key-value cache then; turn it off, or train a prompt"
                )
            kwargs["past_key_values"] = _filled(model, cache, values, batch)
            return (), kwargs
        embedded = kwargs.pop("inputs_embeds", None)
        if embedded is None:
            embedded = model.get_input_embeddings()(kwargs["input_ids"])
        kwargs.pop("input_ids", None)
        kwargs["inputs_embeds"] = torch.cat([values.to(embedded.dtype).expand(batch, -1, -1), embedded], 1)
        if kwargs.get("labels") is not None:
            ignored = kwargs["labels"].new_full((batch, count), -100)
            kwargs["labels"] = torch.cat([ignored, kwargs["labels"]], 1)
        if kwargs.get("position_ids") is not None:
            first = torch.arange(count, device=read.device).expand(kwargs["position_ids"].shape[0], -1)
            kwargs["position_ids"] = torch.cat([first, kwargs["position_ids"]], 1)
        return (), kwargs


def _filled(model: Any, cache: Any, values: Tensor, batch: int) -> Any:
    """Put the prefix into the key-value cache and return the cache; create one if there is none."""
    if cache is None:
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
    layers, heads, features = cache_sizes(model)
    # (tokens, layers, 2, heads, features) -> (layers, 2, heads, tokens, features), where the dimension of
    # size 2 holds key and value
    parts = values.to(model.dtype).view(values.shape[0], layers, 2, heads, features).permute(1, 2, 3, 0, 4)
    for index, (keys, layer_values) in enumerate(parts):
        cache.update(keys.expand(batch, -1, -1, -1), layer_values.expand(batch, -1, -1, -1), index)
    return cache


def cache_sizes(model: Any) -> tuple[int, int, int]:
    """Return the model's number of layers, number of key and value heads, and features of a head.

    Raises:
        ValueError: the model is not a transformers causal language model.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "num_hidden_layers") or not hasattr(model, "get_input_embeddings"):
        raise ValueError(
            "lora.apply: model: expected a transformers causal language model for virtual tokens, received "
            f"{type(model).__name__}"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    features = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, heads, features


def width(model: Any, options: VirtualOptions) -> int:
    """Return the number of values that a file stores for each virtual token."""
    layers, heads, features = cache_sizes(model)
    return 2 * layers * heads * features if isinstance(options, PrefixOptions) else model.config.hidden_size


def token_sizes(model: Any, options: VirtualOptions) -> dict[str, int]:
    """Return the sizes that PEFT's configuration of these virtual tokens contains, by PEFT's names."""
    layers, heads, features = cache_sizes(model)
    prefix = isinstance(options, PrefixOptions)
    return {
        "num_layers": layers,
        "num_attention_heads": heads if prefix else model.config.num_attention_heads,
        "token_dim": heads * features if prefix else model.config.hidden_size,
        "num_transformer_submodules": 1,
    }


def start(model: Any, options: VirtualOptions) -> tuple[Tensor, nn.Module | None]:
    """Draw initial tokens and, if enabled, the projection on the CPU, with the random numbers of PEFT."""
    if isinstance(options, PromptOptions):
        return _prompt(model, options), None
    assert isinstance(options, PrefixOptions)
    full = width(model, options)
    if options.projection:
        _, heads, features = cache_sizes(model)
        hidden = options.hidden_size or heads * features
        tokens = nn.Embedding(options.tokens, heads * features, device="cpu").weight.data
        first = nn.Linear(heads * features, hidden, device="cpu")
        last = nn.Linear(hidden, full, device="cpu")
        if options.init == "zero":
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        return tokens, nn.Sequential(first, nn.Tanh(), last)
    tokens = nn.Embedding(options.tokens, full, device="cpu").weight.data
    return (torch.zeros_like(tokens) if options.init == "zero" else tokens), None


def _prompt(model: Any, options: PromptOptions) -> Tensor:
    """Return the first values of prompt tuning: random, or embeddings of random or given tokens."""
    tokens = nn.Embedding(options.tokens, model.config.hidden_size, device="cpu").weight.data
    if options.init == "random":
        return tokens
    embedding = model.get_input_embeddings()
    if options.init == "vocabulary":
        ids = torch.randint(0, embedding.num_embeddings, (options.tokens,), device="cpu")
    else:
        ids = torch.tensor(options.init).repeat(-(-options.tokens // len(options.init)))[: options.tokens]
    with torch.no_grad():
        result: Tensor = embedding(ids.to(embedding.weight.device)).float().cpu()
        return result


def attach_tokens(
    model: nn.Module, name: str, options: VirtualOptions, values: Tensor, transform: nn.Module | None
) -> None:
    """Add virtual tokens to a model; register the hook that inserts them, unless the model has the hook."""
    watch()
    tokens = getattr(model, "virtual_tokens", None)
    if not isinstance(tokens, VirtualTokens):
        model.virtual_tokens = tokens = VirtualTokens()
        model.register_forward_pre_hook(tokens.before, with_kwargs=True)
    device = next(model.parameters()).device
    tokens.add(
        name, options, values.to(device, torch.float32), None if transform is None else transform.to(device)
    )


def detach_tokens(model: nn.Module) -> None:
    """Remove the virtual tokens and their hook from a model."""
    tokens = model.virtual_tokens
    for key, hook in list(model._forward_pre_hooks.items()):
        if getattr(hook, "__self__", None) is tokens:
            del model._forward_pre_hooks[key], model._forward_pre_hooks_with_kwargs[key]
    del model.virtual_tokens
