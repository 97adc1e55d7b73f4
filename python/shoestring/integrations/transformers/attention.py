"""Let transformers models use shoestring's attention by ``attn_implementation="shoestring"``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.attention.attention import attention
from shoestring.core.instances import Found, Left

NAME = "shoestring"


def register_attention() -> str:
    """Register ``attn_implementation="shoestring"`` with transformers and return that name.

    Use the name as ``from_pretrained(..., attn_implementation=shoestring.register_attention())``, or with
    ``model.set_attn_implementation``. Causal masks, sliding windows and padding become options of
    :func:`attention`, without tensors of (tokens, tokens). Any other mask of the model or the user becomes a
    bool bias of the scores. The dropout mask is computed from a seed. If the call has ``cu_seq_lens_q`` and
    ``cu_seq_lens_k`` (a packed batch), each sequence attends only to itself, whatever the mask.

    Returns:
        The name "shoestring".

    Raises:
        ImportError: transformers is not installed, or older than 4.56.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(config)
        >>> model.set_attn_implementation(shoestring.register_attention())
        >>> model(torch.tensor([[1, 2, 3, 4]])).logits.shape
        torch.Size([1, 4, 32])
    """
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, functools.partial(mask, masking_utils))
    return NAME


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention, with the signature of transformers' attention functions.

    The size of the sliding window is taken from the mask, as for "sdpa", because not every layer with a
    window passes its size.

    Args:
        module: the attention module that calls this function.
        query, key, value: (batch, heads, tokens, head_dim).
        attention_mask: the result of ``mask``, or another mask of transformers.
        dropout: the dropout probability.
        scaling, softcap, is_causal: the options ``scale``, ``softcap`` and ``causal`` of :func:`attention`.
        s_aux: attention sinks, as in the option ``sinks`` of :func:`attention`.
        position_bias: a bias that is added to the scores.
        cu_seq_lens_q, cu_seq_lens_k: offsets of packed sequences, as in ``cu_seqlens_q`` of
            :func:`attention`.

    Returns:
        The output, (batch, tokens, heads, value_dim), and None in place of attention weights.

    Raises:
        TypeError: an argument is not supported.
    """
    if kwargs.get("cache") is not None:
        raise TypeError(
            "shoestring's attention: cache: expected no paged cache; set attn_implementation to 'paged|sdpa' to serve"
        )
    for name, argument in kwargs.items():
        # An unknown floating-point argument is probably meant to change the scores, so it must not be
        # ignored. Tensors of positions are integers.
        if isinstance(argument, Tensor) and argument.is_floating_point() and argument.dim() > 0:
            raise TypeError(
                f"shoestring's attention: {name}: expected no such tensor, received one of {tuple(argument.shape)} from "
                f"{type(module).__name__}; set attn_implementation to 'eager'"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    masked_by_layer = cu_seq_lens_q is not None or _is_no_padding(attention_mask)
    window, bias = None, None
    # a mask of 5 dimensions is a sliding window, see mask()
    if attention_mask is not None and attention_mask.dim() == 5:
        batch, _, keys, window, rest = attention_mask.shape
        if rest != 1 or keys != key.size(2):
            raise TypeError(
                f"shoestring's attention: attention_mask: expected (batch, 1, {key.size(2)}, window, 1) as it was made for a "
                f"sliding window, received {tuple(attention_mask.shape)}, which {type(module).__name__} has changed; set "
                "attn_implementation to 'eager'"
            )
        attention_mask = attention_mask[:, 0, :, 0, 0] if batch > 0 else None
    elif masked_by_layer:
        window = _window_of(module, kwargs)
    if attention_mask is not None and not masked_by_layer:
        # A mask of 4 dimensions already contains the causal mask and the window.
        if attention_mask.dim() == 4:
            bias, causal = attention_mask[..., : key.size(2)], False
        else:
            bias = attention_mask[:, None, None, :].bool()
    if position_bias is not None:
        bias = position_bias if bias is None else _sum(position_bias, bias)
    options: dict[str, Any] = {
        "causal": causal,
        "window_size": (window - 1, -1) if window else None,
        "softcap": softcap or 0.0,
        "scale": scaling,
        "bias": bias,
        "sinks": s_aux,
    }
    if dropout > 0:
        options |= {"dropout_p": dropout, "seed": torch.randint(2**62, (1,), device=query.device)}
    if cu_seq_lens_q is not None:
        flat = [t[0].transpose(0, 1) for t in (query, key, value)]
        out: Tensor = attention(
            *flat, **options, cu_seqlens_q=cu_seq_lens_q.int(), cu_seqlens_k=_ints(cu_seq_lens_k)
        )
        return out[None], None
    out = attention(query, key, value, **options)
    return out.transpose(1, 2), None


def no_padding(device: torch.device) -> Tensor:
    """Return an ``attention_mask`` which says that a batch is neither padded nor packed.

    It is an empty tensor of 4 dimensions, which transformers passes on to ``attend``. Without a mask,
    transformers looks in the positions for packed sequences, and the host waits for the device in each
    forward.
    """
    return torch.empty(1, 1, 1, 0, dtype=torch.bool, device=device)


def _is_no_padding(mask: Tensor | None) -> bool:
    return mask is not None and mask.shape == (1, 1, 1, 0)


def _window_of(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Return the sliding window that the layer passes to attention for a batch without a mask, if any.

    transformers makes no mask for packed sequences and for :func:`no_padding`, so the window cannot be taken
    from a mask.
    """
    if "sliding_window" not in kwargs and getattr(getattr(module, "config", None), "sliding_window", None):
        raise TypeError(
            f"shoestring's attention: sliding_window: expected {type(module).__name__} to pass it for packed sequences, received "
            "none; leave out cu_seq_lens_q (or no_padding), or set config.sliding_window to None"
        )
    return kwargs.get("sliding_window")


def _ints(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.int()


def _sum(bias: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of a bias and a mask, which may be boolean."""
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def mask(
    masking: ModuleType,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Build the mask for ``attend``, with the signature of transformers' mask functions.

    Returns:
        - For a causal mask or no mask: the padding mask (batch, keys), zero for padding; or None without
          padding.
        - For a sliding window: an expanded view (batch, 1, keys, window, 1) of the padding mask (batch,
          keys). Its shape tells ``attend`` the window. The batch size is 0 without padding. If the model
          appends to the mask, the last size is no longer 1, which ``attend`` detects.
        - For any other mask: the mask that transformers' ``sdpa_mask`` builds.
    """
    if attention_mask is not None and attention_mask.dim() == 5:
        return attention_mask  # generate() has made this mask before, for a cache of fixed size
    function = masking.causal_mask_function if mask_function is None else mask_function
    # Whether options of `attend` express the mask, so that no (tokens, tokens) mask is built. A causal mask
    # or a sliding window requires that the queries are the last tokens of the sequence.
    known = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if allow_is_bidirectional_skip:
        known = local_size is None
    elif not allow_is_causal_skip:
        known = False
    elif function is not masking.causal_mask_function:
        known = known and local_size is not None and _is_sliding(function, local_size, config)
    if attention_mask is not None:
        known = known and attention_mask.shape[-1] >= kv_offset + kv_length
    if not known:
        result: Tensor | None = masking.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=function, attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, **kwargs,
        )  # fmt: skip
        return result
    seen = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length]
    if seen is not None and not torch.compiler.is_compiling() and seen.all():
        seen = None
    if function is masking.causal_mask_function or local_size is None:
        return seen
    if seen is None:
        seen = torch.empty(0, kv_length, dtype=torch.bool, device=kwargs.get("device"))
    return seen[:, None, :, None, None].expand(-1, -1, -1, local_size, -1)


def _is_sliding(function: Callable[..., Tensor], size: int, config: Any) -> bool:
    """Return whether a mask function means a sliding window of ``size`` tokens, not chunks of ``size``.

    With chunks, a token attends only to earlier tokens of its own chunk. In eager mode the mask function is
    evaluated for keys at which a window and chunks differ. Under torch.compile it cannot be evaluated, so the
    model's configuration decides. This suffices, because among the masks with ``allow_is_causal_skip`` only
    windows and chunks have a size.
    """
    if torch.compiler.is_compiling():
        return (
            getattr(config, "sliding_window", None) == size
            and getattr(config, "attention_chunk_size", None) is None
        )
    # Padding moves the begin of chunks. Two neighbouring queries are never both the last of a chunk.
    queries = (torch.tensor(3 * size), torch.tensor(3 * size + 1))
    keys = {0: True, size - 1: True, size: False, 1 - 2 * size: False, -1: False}
    zero = torch.tensor(0)
    return all(
        bool(function(zero, zero, query, query - back)) == seen
        for query in queries
        for back, seen in keys.items()
    )


@contextmanager
def _recorded_calls() -> Iterator[list[str]]:
    """Yield a list that gets an entry for each call of the attention while the block runs."""
    from transformers import AttentionInterface

    calls: list[str] = []

    def recording(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(module).__name__)
        return attend(module, *args, **kwargs)

    AttentionInterface.register(NAME, recording)
    try:
        yield calls
    finally:
        AttentionInterface.register(NAME, attend)


def use_attention(model: Any, check: Callable[[], object]) -> tuple[list[Found], list[Left]]:
    """Set a model's attention implementation to shoestring's; revert it if the function ``check`` raises.

    Returns:
        Two lists: the change (empty if the model does not support shoestring's attention, or has no attention), and the
        reason why nothing changed if ``check`` raised.
    """
    before = getattr(model.config, "_attn_implementation", None)
    if before not in ("eager", "sdpa") or not model._can_set_attn_implementation():
        return [], []
    model.set_attn_implementation(register_attention())
    if model.config._attn_implementation != NAME:
        return [], []
    undo = functools.partial(model.set_attn_implementation, before)
    where = type(model).__name__
    try:
        with _recorded_calls() as calls:
            check()
    except Exception as error:
        undo()
        return [], [(where, f"attention that makes something else of its masks: {error}")]
    if not calls:  # a model without attention may have the setting, too
        undo()
        return [], []
    return [(where, f"attention of shoestring in place of {before}", undo)], []
