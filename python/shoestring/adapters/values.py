"""Read and write tensors of a model that processes may have split into shards (DTensors)."""

import torch
from torch import Tensor

from shoestring.core.dtensors import is_dtensor
from shoestring.quantization.quantized_tensor import QuantizedTensor, quantize_parts


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, which all its processes must call for; any other tensor itself."""
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor


@torch.no_grad()
def fill(dst: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a tensor of a model, which may be a DTensor or quantised."""
    dst, value = dst.detach(), value.detach()
    if is_dtensor(dst):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(dst.device, dst.dtype), dst.device_mesh, dst.placements)
    if isinstance(dst, QuantizedTensor):
        value = value.to(dst.device, torch.float32)
        value = quantize_parts(value, dst.quant_type, dst.block_size, dst.nested is not None).to(dst.dtype)
    dst.copy_(value)
