"""Build parameter groups of optimizers with the learning rates of LoRA+."""

from typing import Any

from torch import nn


def loraplus_param_groups(
    model: nn.Module,
    lr: float,
    *,
    lr_ratio: float = 16.0,
    weight_decay: float = 0.0,
    embedding_lr: float = 1e-6,
) -> list[dict[str, Any]]:
    """Build parameter groups for LoRA+ (arXiv 2402.12354).

    The learning rate of lora_B and of all vectors is ``lr_ratio`` times that of lora_A.

    Args:
        model: the model, of which all parameters that require a gradient are included.
        lr: learning rate of lora_A and of other matrices.
        lr_ratio: the learning rate of lora_B divided by that of lora_A, at least 1.
        weight_decay: weight decay of matrices; vectors have none.
        embedding_lr: learning rate of embeddings and of adapters on embeddings.

    Returns:
        Parameter groups with params, lr and weight_decay; empty groups are left out.

    Raises:
        ValueError: lr_ratio is below 1, or no parameter requires a gradient.

    Example:
        >>> model = shoestring.lora.apply(torch.nn.Sequential(torch.nn.Linear(8, 4)), rank=2)
        >>> groups = shoestring.lora.loraplus_param_groups(model, lr=0.001, lr_ratio=16)
        >>> [group["lr"] for group in groups]
        [0.001, 0.016]
        >>> optimizer = shoestring.optim.AdamW(groups)
    """
    if lr_ratio < 1:
        raise ValueError(f"lora.loraplus_param_groups: lr_ratio: expected at least 1, received {lr_ratio!r}")
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        fast = any(part.startswith("lora_B") for part in name.split(".")) or parameter.dim() == 1
        rate = embedding_lr if id(parameter) in embeddings else lr * lr_ratio if fast else lr
        groups.setdefault((rate, 0.0 if parameter.dim() == 1 else weight_decay), []).append(parameter)
    if not groups:
        raise ValueError(
            "lora.loraplus_param_groups: model: expected parameters that require a gradient, received none"
        )
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]
