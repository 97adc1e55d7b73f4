"""Schedule-Free AdamW with state in few bits."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from typing_extensions import Unpack

from shoestring.optim.apply import apply_
from shoestring.optim.arena import Arena, Moment
from shoestring.optim.base import LowMemoryOptimizer, LowMemoryOptions
from shoestring.optim.interrupts import Uninterrupted
from shoestring.optim.optimizer import ReferenceArena, ReferenceArguments, StepArguments, reference_step
from shoestring.optim.sharded import local


def schedule_free_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    offset: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    warmup_steps: int = 0,
    **arguments: Unpack[StepArguments],
) -> None:
    """One step of Schedule-Free AdamW, in place, on every parameter that has a gradient, in one pass over all of them.

    "The Road Less Scheduled" (arXiv 2405.15682) has three sequences of weights: z takes the steps, x is its average,
    and gradients are taken at y, between them. Here y is the parameter, and ``offset`` is z - y. With
    ``u = g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay y``, where v is the mean of squared gradients, and c the
    step's share of the average,

        y <- y + c offset + lr (beta1 (1 - c) - 1) u,    offset <- (1 - c) (offset - lr beta1 u),

    which is ``z <- z - lr u``, ``x <- (1 - c) x + c z``, ``y = beta1 x + (1 - beta1) z``. The weights for evaluation
    are ``x = y - offset (1 - beta1) / beta1``. In step t up to ``warmup_steps`` = W, the learning rate is t / W times
    lr, and c is proportional to the square of it: ``c = 6 t / ((t + 1) (2 t + 1))``; from there on each step counts as
    much as the last of the warm-up, whatever lr is. Without a warm-up c is 1 / t.

    The state of all parameters lies in flat arenas as for ``adamw_``. A NaN or infinite gradient spoils its weight, and
    with codes its block of 256, but no other.

    Args:
        params: y; fp32, bf16 or fp16, any shapes and sizes; arithmetic is fp32.
        grads: one for each parameter, its shape, fp32, bf16 or fp16; or None: the parameter and its step stay as they
            are.
        step: (parameters), fp32: steps taken; incremented.
        offset: (elements of the arena): fp32 where ``exp_avg_sq`` is, else bf16, rounded stochastically: codes are
            further apart than it moves in a step.
        exp_avg_sq: (elements of the arena): fp32 or bf16, or codes (uint8, 8 or 4 bits each).
        exp_avg_sq_scale: of codes, fp32: (elements of the arena / 256), or as ``quantize_state_4bit`` has it.
        lr, beta2, eps: as for ``adamw_``.
        beta1: of x in y; above 0 and below 1.
        weight_decay: of y, a part of the update; at least 0.
        warmup_steps: at least 0.
        **arguments: see ``StepArguments``.

    Raises:
        RuntimeError: a shape, dtype, device or option that does not fit; nothing has changed then.
    """
    torch.ops.shoestring.schedule_free_adamw_(
        params,
        grads,
        step,
        offset,
        exp_avg_sq,
        exp_avg_sq_scale,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        warmup_steps=warmup_steps,
        **arguments,
    )


def schedule_free_adamw_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    step: Tensor,
    offset: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    warmup_steps: int = 0,
    **arguments: Unpack[ReferenceArguments],
) -> None:
    """``schedule_free_adamw_`` in plain PyTorch, a tensor at a time."""

    def share(t: int) -> float:
        weights = [min(i / max(warmup_steps, 1), 1) ** 2 for i in range(1, t + 1)]
        return weights[-1] / sum(weights)

    def rule(lr: float, t: int, y: Tensor, g: Tensor, offset: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        c, lr = share(t), lr * min(t / max(warmup_steps, 1), 1)
        v = v * beta2 + g * g * (1 - beta2)
        u = g / (v.sqrt() / (1 - beta2**t) ** 0.5 + eps) + weight_decay * y
        return y + c * offset + lr * (beta1 * (1 - c) - 1) * u, (1 - c) * (offset - lr * beta1 * u), v

    arenas = [
        ReferenceArena(offset, None, True, beta1),
        ReferenceArena(exp_avg_sq, exp_avg_sq_scale, False, beta2),
    ]
    reference_step(rule, params, grads, step, arenas, lr=lr, **arguments)


class ScheduleFreeAdamW(LowMemoryOptimizer):
    """Schedule-Free AdamW (arXiv 2405.15682) whose state takes 3.02 bytes a parameter instead of 8.

    Needs no learning rate schedule: gradients are taken at one point (y), and the weights for evaluation (x) are an
    average over all steps so far, without an end having to be known. Parameters hold y while they are trained;
    ``eval()`` makes them x and ``train()`` y again, so both are to be called where the model's are:

        optimizer.train(); model.train()    # the mode that an optimizer begins in
        ...
        optimizer.eval(); model.eval()      # before evaluation, and before saving weights for use

    Calls beyond the first change nothing; there and back is within a unit in the last place of the larger of x and y.
    Model and optimizer are to be saved in the same mode, whichever: a loaded state dict's mode is that of the weights
    saved beside it. Batch norm's running statistics are those of y; before evaluation, a few batches through the model
    in training make them those of x.

    The paper's z is kept as its distance to y, as bf16 where other moments are codes: it moves by less in a step than
    codes are apart. Rounding is stochastic, and right in the mean.

    Memory: ``sum(ceil(n / 256) * 772 + 4)`` bytes over the parameters that have had a gradient, n being their sizes; in
    place of 772, 648 for 4-bit state, 1024 for bf16 and 2048 for fp32, and 512 more with ``weights="remainder"``.

    Args:
        params: parameters, named parameters or groups; fp32, bf16 or fp16.
        lr: learning rate; a number, or a tensor of one element, as for ``AdamW``. Usually 1 to 10 times AdamW's. It may
            be changed, but does not enter the weights of the average: these are the squares of the warm-up's rates, and
            the same from there on, so that they follow from the number of a parameter's steps alone.
        betas: the share of x in y, above 0 and below 1, and decay of the running mean of the gradient's square, in
            [0, 1). The first is not to be changed between ``eval()`` and ``train()``.
        eps: added to the root of the second moment.
        weight_decay: times y, a part of the update: decoupled.
        warmup_steps: steps in which the learning rate rises to ``lr``, evenly; 0: it is there at once.
        **options: see ``LowMemoryOptions``.

    Raises:
        ValueError: an option, dtype or loaded state that does not fit; nothing has changed then.
        RuntimeError: a step in eval mode.

    What ``AdamW`` says of groups, state dicts, GradScaler, CUDA graphs and ``grad_norm`` holds here as well;
    ``state[p]`` holds ``step, offset, exp_avg_sq, exp_avg_sq_scale`` (without the scale for fp32), and groups the mode,
    ``train_mode``.
    """

    _moments = (Moment("offset", signed=True, long=True), Moment("exp_avg_sq", signed=False))
    _operator = staticmethod(schedule_free_adamw_)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        **options: Unpack[LowMemoryOptions],
    ) -> None:
        own = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, warmup_steps=warmup_steps, train_mode=True
        )
        super().__init__(params, own, **options)

    def train(self) -> None:
        """Makes parameters those that gradients are taken at."""
        self._switch(train_mode=True)

    def eval(self) -> None:
        """Makes parameters the average, to be evaluated."""
        self._switch(train_mode=False)

    @_disable_dynamo
    @torch.no_grad()
    def _switch(self, *, train_mode: bool) -> None:
        with Uninterrupted():
            self._switch_all(train_mode)

    def _switch_all(self, train_mode: bool) -> None:
        for index, group in enumerate(self.param_groups):
            if group["train_mode"] == train_mode:
                continue
            beta1 = group["betas"][0]
            for arena in self._layouts[index].arenas if index in self._layouts else ():
                if arena.offloaded is None and arena.host is None:
                    self._apply(arena, arena.params, beta1, train_mode, arena.values.get("weight_remainder"))
                    continue
                for i, p in enumerate(arena.params):  # one at a time: the device has room for no more
                    kept = arena.run(i, i + 1, self._moments).values.get("weight_remainder")
                    remainder = None if kept is None else kept.to(local(p).device)
                    self._apply(arena, [p], beta1, train_mode, remainder)
                    if kept is not None and remainder is not None:
                        kept.copy_(remainder)
            group["train_mode"] = train_mode

    def _apply(
        self, arena: Arena, params: list[Tensor], beta1: float, train_mode: bool, remainder: Tensor | None
    ) -> None:
        apply_(
            [local(p) for p in params],
            [self.state[p]["offset"].to(local(p).device) for p in params],
            arena.step[: len(params)].to(local(params[0]).device, copy=True),
            lr=(1 - beta1) / beta1,
            weight_decay=0.0,
            maximize=train_mode,
            weight_remainder=remainder,
        )

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every parameter that has a gradient; returns what the closure, if any, returns."""
        self._expect_train()
        return super().step(closure)

    def _step_alone(self, param: Tensor) -> None:
        self._expect_train()
        super()._step_alone(param)

    def _arrive(self, param: Tensor) -> None:
        self._expect_train()
        super()._arrive(param)

    def _expect_train(self) -> None:
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                f"{self._name}: step: expected train mode, received eval mode; call train() before forward and backward"
            )

    def _rule(self, group: dict[str, Any]) -> dict[str, Any]:
        names = ("eps", "weight_decay", "warmup_steps")
        return dict(zip(("beta1", "beta2"), group["betas"], strict=True)) | {n: group[n] for n in names}

    def _check_rule(self, group: dict[str, Any]) -> None:
        betas, steps = group["betas"], group["warmup_steps"]
        good = len(betas) == 2 and 0 < betas[0] < 1 and 0 <= betas[1] < 1
        self._expect(good, "betas", "two numbers in [0, 1), the first above 0", betas)
        for name in ("eps", "weight_decay"):
            self._expect(group[name] >= 0, name, "a number of at least 0", group[name])
        self._expect(
            isinstance(steps, int) and steps >= 0, "warmup_steps", "a number of steps of at least 0", steps
        )
        self._expect(
            isinstance(group["train_mode"], bool), "train_mode", "True or False", group["train_mode"]
        )
