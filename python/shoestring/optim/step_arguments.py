"""Arguments that all optimizer operators share."""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import TypedDict


class StepArguments(TypedDict, total=False):
    """Keyword arguments of every optimizer operator.

    All tensors are on the parameters' device. None disables an optional tensor.

    maximize: ascend the gradient instead of descending it.
    lr_tensor: replaces lr; its sign is not checked. ``lr_tensor``, ``grad_scale``, ``clip_coef`` and
        ``found_inf`` each hold one fp32 element. The GPU reads them itself, so the host does not wait, and a
        CUDA graph can replay the step.
    grad_scale: divides the gradients.
    clip_coef: multiplies the gradients.
    found_inf: if the element is not zero, the step changes nothing, except that it sets ``accumulated`` to
        zero.
    weight_remainder: int16, as many elements as the flat state tensors. A bf16 weight and its remainder
        together hold one fp32 weight, which the step changes exactly as it would change an fp32 parameter.
        The weight is the upper half of that fp32 value, rounded to nearest (halves away from zero):
        ``bits(fp32) = (bits(weight) << 16) + remainder``.
    accumulated: gradient sums over micro-batches, fp32 or bf16, as many elements as the flat state tensors.
        For each parameter that has a gradient, the step adds the sum to the gradient and then sets the sum to
        zero.
    stochastic_rounding: rounds bf16 weights up or down at random so that the expected value is exact, instead
        of to nearest.
    seed: seed of the random bits. Random bits are a function of the seed, the step, the parameter's entry in
        ``numbers`` and the index of the element in the parameter.
    numbers: one integer below 2^20 for each parameter, on which its random bits depend. Empty means the
        indices of the parameters in ``params``.
    first_block, blocks: step only ``blocks`` blocks of 256 elements, starting at block ``first_block`` of the
        first parameter. The state tensors hold just these blocks. ``blocks=None`` steps whole parameters.
        Only CPU operators whose update rule is elementwise can step a part.
    """

    maximize: bool
    lr_tensor: Tensor | None
    grad_scale: Tensor | None
    clip_coef: Tensor | None
    found_inf: Tensor | None
    weight_remainder: Tensor | None
    accumulated: Tensor | None
    stochastic_rounding: bool
    seed: int
    numbers: Sequence[int]
    first_block: int
    blocks: int | None
