"""Test that tensors on different devices are refused with one line that names the argument."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring


def of_lora(quantize: str | None) -> Callable[[Tensor, Tensor], Any]:
    """Return a call of an adapted layer: with the weights on the device of w, and the input on that of x."""

    def call(x: Tensor, w: Tensor) -> Any:
        model = nn.Sequential(nn.Linear(16, 16))
        return shoestring.lora.apply(model, rank=2, quantize=quantize).to(w.device)(x)

    return call


CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "foreach_norm: tensors": lambda x, w: shoestring.ops.foreach_norm([x, w]),
    "lora_linear: lora_A": of_lora(None),
    "lora_linear: lora_A of nf4": of_lora("nf4"),
    "lora_linear: lora_A of int8": of_lora("int8"),
}


@pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta", "cpu")], ids="-".join)
@pytest.mark.parametrize("name", CALLS)
def test_tensors_on_different_devices(name: str, devices: tuple[str, str]) -> None:
    """The model is on one device and the batch on another."""
    x, w = torch.randn(3, 16).to(devices[0]), torch.randn(16, 16).to(devices[1])
    with pytest.raises(
        RuntimeError, match=f"^{name.partition(' of ')[0]}.*: expected .* received "
    ) as caught:
        CALLS[name](x, w)
    assert all(device in str(caught.value).splitlines()[0] for device in devices)
