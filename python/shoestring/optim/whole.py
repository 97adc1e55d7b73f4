"""The base class of optimizers such as LAMB and Muon, which need a whole parameter to update an element."""

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from shoestring.core.dtensors import is_dtensor
from shoestring.optim.base import LowMemoryOptimizer, distinct
from shoestring.optim.sharded import row_begins, shards


def expect_rows(name: str, index: int, param: Tensor) -> None:
    """Raise ValueError if processes have split the parameter in another way than by rows."""
    split = shards(param)
    if is_dtensor(param) and split is not None and split.groups and not row_begins(param, split):
        raise ValueError(
            f"{name}: params[{index}]: expected a DTensor that is split by rows over one dimension of its mesh, as "
            f"fully_shard does, received placements {tuple(param.placements)}"
        )


class WholeTensorOptimizer(LowMemoryOptimizer):
    """The base class of optimizers that need the whole parameter.

    Their operators step rows of DTensor parameters, and communicate.
    """

    def _check_param(self, index: int, param: Tensor) -> None:
        """Raise ValueError if the optimizer does not support the parameter."""
        expect_rows(self._name, index, param)

    def _check_replaced(self, shapes: dict[int, torch.Size], params: list[Tensor]) -> None:
        """Raise RuntimeError for new tensors of other shapes, such as the ranges that DeepSpeed's ZeRO steps."""
        for shape, param in zip_longest(shapes.values(), params):
            if param is None or (param._cdata not in shapes and param.shape != shape):
                raise RuntimeError(
                    f"{self._name}: params: expected whole parameters, received "
                    f"{'none' if param is None else tuple(param.shape)} in place of "
                    f"{'none' if shape is None else tuple(shape)}, as ZeRO of DeepSpeed gives. Use its stage 0, "
                    "fully_shard or shoestring.parallelize, or another optimizer, such as AdamW"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in ``torch.optim.Optimizer``.

        Its parameters and options are checked before anything changes.
        """
        param_group["params"] = distinct(self._name, param_group["params"])
        for i, item in enumerate(param_group["params"]):
            param = item[1] if isinstance(item, tuple) else item
            if isinstance(param, Tensor):
                self._check_param(i, param)
        super().add_param_group(param_group)
