"""Read and write tensors of a model that processes may have split into shards (DTensors)."""

import torch
from torch import Tensor

from shoestring.core.dtensors import is_dtensor
from shoestring.quantization.quantized_tensor import QuantizedTensor, quantize_parts


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, which all its processes must call for; any other tensor itself."""
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor


@torch.no_grad()
def fill(own: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a tensor of a model, which may be a DTensor or quantised."""
    own, value = own.detach(), value.detach()
    if is_dtensor(own):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(own.device, own.dtype), own.device_mesh, own.placements)
    if isinstance(own, QuantizedTensor):
        value = value.to(own.device, torch.float32)
        value = quantize_parts(value, own.quant_type, own.block_size, own.nested is not None).to(own.dtype)
    own.copy_(value)
