"""A placeholder for the logits of an output layer, for a forward pass that computes no logits.

Only a model's own forward reliably describes how the model uses its logits. Therefore the forward runs
unchanged, but its output layer returns a ``Logits`` object instead of a tensor. The object records the
operations that the forward applies to the logits: a factor, a tanh, a view of the tokens. ``cross_entropy``
of the object calls ``shoestring.linear_cross_entropy`` of the hidden states, with the recorded operations as
options. Any other operation on the object raises an error that names the operation.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.integrations.transformers.head import weights
from shoestring.losses.linear_cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Logits:
    """A placeholder for the logits ``outer * tanh(scale * head(hidden))``, or ``scale * head(hidden)``.

    ``hidden`` is (..., features); the object stands for a tensor (..., vocab). With ``before``, the head is
    applied to ``before(hidden)``. This function computes each token by itself.
    """

    hidden: Tensor
    head: nn.Module
    make: Callable[[], Tensor]
    workspace_mb: int = 0
    scale: float | Tensor = 1.0
    outer: float | None = None  # factor that multiplies the tanh of the logits; None: no tanh
    before: Callable[[Tensor], Tensor] | None = None

    @property
    def vocab(self) -> int:
        """The number of classes of the logits."""
        return self.head.out_features  # type: ignore[return-value]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocab))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    def dim(self) -> int:
        return self.hidden.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return len(self.hidden)

    # ---- conversions, which are not recorded, because the loss accumulates in fp32 in any case ----

    def float(self) -> Logits:
        return replace(self, make=lambda: self.make().float())

    def contiguous(self) -> Logits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Logits:
        like = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if like.device != self.device or not like.dtype.is_floating_point:
            raise refused(f"to{args}")
        return replace(self, make=lambda: self.make().to(*args, **kwargs))

    # ---- operations that only change the view of the tokens ----

    def view(self, *shape: Any) -> Logits:
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if not shape or shape[-1] != self.vocab:
            raise refused(f"view{shape} of {self.vocab} classes")
        # A tensor of logits would be contiguous, so view() would work. A slice of the hidden states
        # (logits_to_keep) may not be contiguous, so reshape it.
        hidden = self.hidden.reshape(*shape[:-1], self.hidden.shape[-1])
        return replace(self, hidden=hidden, make=lambda: self.make().view(shape))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Logits:
        if end_dim % self.ndim == self.ndim - 1 and start_dim % self.ndim != self.ndim - 1:
            raise refused("flatten over the classes")
        hidden = self.hidden.flatten(start_dim, end_dim)
        return replace(self, hidden=hidden, make=lambda: self.make().flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Logits:
        parts = index if isinstance(index, tuple) else (index,)
        simple = all(part is ... or isinstance(part, (int, slice)) for part in parts)
        # whether the last part of the index applies to the dimension of the classes
        reaches = ... in parts or len(parts) == self.ndim
        if not simple or (reaches and parts[-1] is not ... and parts[-1] != slice(None)):
            raise refused(f"[{index}]")
        return replace(self, hidden=self.hidden[index], make=lambda: self.make()[index])

    # ---- factors and tanh, which become options of the loss ----

    def __mul__(self, factor: Any) -> Logits:
        number = isinstance(factor, (int, float))
        if not number and not (isinstance(factor, Tensor) and factor.numel() == 1 and self.outer is None):
            raise refused("mul by more than one number")
        scaled = replace(self, make=lambda: self.make() * factor)
        if self.outer is None:
            return replace(scaled, scale=self.scale * factor)
        return replace(scaled, outer=self.outer * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Logits:
        if not isinstance(divisor, (int, float, Tensor)):
            raise refused("div by something else than a number")
        return replace(self * (1 / divisor), make=lambda: self.make() / divisor)

    def mul(self, factor: Any) -> Logits:
        return self.__mul__(factor)

    def div(self, divisor: Any) -> Logits:
        return self.__truediv__(divisor)

    def tanh(self) -> Logits:
        if self.outer is not None:
            raise refused("a second tanh")
        return replace(self, outer=1.0, make=lambda: self.make().tanh())

    # ---- the loss ----

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: builtins.float = 0.0,  # inside this class the name `float` is a method
    ) -> Tensor:
        """Compute ``torch.nn.functional.cross_entropy`` of the logits that this object stands for."""
        if self.ndim != 2 or size_average is not None or reduce is not None or target.is_floating_point():
            raise refused(f"cross_entropy of {self.ndim} dimensions, a legacy reduction or soft targets")
        softcap: dict[str, Any] = {"logit_scale": self.scale}
        if self.outer is not None:
            softcap = {"logit_scale": self.scale * self.outer, "softcap": self.outer}
        features, target = self._counted(target, ignore_index, reduction)
        hidden, matrix, bias, lora = weights(self.head, features)
        return linear_cross_entropy(
            hidden,
            matrix,
            target,
            bias,
            class_weights=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            workspace_mb=self.workspace_mb,
            **softcap,
            **lora,
        )

    def _counted(self, target: Tensor, ignore_index: int, reduction: str) -> tuple[Tensor, Tensor]:
        """Return the inputs of the head and the targets, without the ignored tokens if this saves time.

        The loss skips ignored tokens in any case. Without them, ``before`` skips them too. On a GPU, and in a
        graph of ``torch.compile``, the host does not know their number, so all tokens remain.
        """
        if self.before is None:
            return self.hidden, target
        if reduction != "none" and target.device.type == "cpu" and not torch.compiler.is_compiling():
            counted = (target != ignore_index).nonzero().squeeze(1)
            if 0 < len(counted) < len(target):
                return self.before(self.hidden.index_select(0, counted)), target[counted]
        return self.before(self.hidden), target

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = KNOWN.get(func)
        if known is None or not isinstance(args[0], Logits):
            swapped = func in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
            if swapped and len(args) == 2 and isinstance(args[1], Logits):
                return args[1] * args[0]
            raise refused(getattr(func, "__name__", str(func)))
        return known(*args, **(kwargs or {}))


KNOWN: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.cross_entropy: Logits.cross_entropy,
    torch.tanh: Logits.tanh,
    torch.mul: Logits.__mul__,
    torch.div: Logits.__truediv__,
    torch.flatten: Logits.flatten,
    torch.reshape: Logits.view,
}


def refused(what: str) -> TypeError:
    """Return the exception for an operation that is impossible without a tensor of logits."""
    return TypeError(
        f"shoestring.patch: logits: {what}: expected an operation that needs no logits in memory; call "
        "report.undo(), or do it with labels=None"
    )
