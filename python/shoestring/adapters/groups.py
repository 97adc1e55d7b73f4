"""Parameter groups for an optimizer."""

from typing import Any

from torch import nn


def parameter_groups(
    model: nn.Module,
    lr: float,
    *,
    lr_ratio: float = 16.0,
    weight_decay: float = 0.0,
    embedding_lr: float = 1e-6,
) -> list[dict[str, Any]]:
    """LoRA+ (arXiv 2402.12354): lora_B, and all vectors, learn ``lr_ratio`` times as fast as lora_A.

    Args:
        model: what requires a gradient is taken.
        lr: of lora_A and of other matrices.
        lr_ratio: at least 1.
        weight_decay: of matrices; vectors have none.
        embedding_lr: of adapters on embeddings, and of embeddings.

    Returns:
        Groups with params, lr and weight_decay, without empty ones.

    Raises:
        ValueError: lr_ratio below 1, or a model in which nothing is trained.
    """
    if lr_ratio < 1:
        raise ValueError(f"lora.parameter_groups: lr_ratio: expected at least 1, received {lr_ratio!r}")
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        fast = "lora_B" in name.split(".") or parameter.dim() == 1
        rate = embedding_lr if id(parameter) in embeddings else lr * lr_ratio if fast else lr
        groups.setdefault((rate, 0.0 if parameter.dim() == 1 else weight_decay), []).append(parameter)
    if not groups:
        raise ValueError(
            "lora.parameter_groups: model: expected parameters that require a gradient, received none"
        )
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]
