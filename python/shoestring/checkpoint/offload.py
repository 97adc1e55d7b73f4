"""Saved activations in host memory, or on a disk, between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn


class offload_activations(torch.autograd.graph.saved_tensors_hooks):
    """What autograd saves inside of this leaves the device, and comes back for backward::

        offload = shoestring.offload_activations(exclude=model.buffers())
        for batch in batches:
            with offload:
                loss = model(batch)
            loss.backward()
            optimizer.step()

    Storages are copied beside the computation and each once, however many saved tensors are views of it; they are freed
    when they have been copied and their layer is over. Backward finds the last layer where it was, and copies the layers
    before it back ahead of time. Without compression all gradients are bitwise those without this. Host memory (page-locked for
    CUDA) is taken in the first step, and used again in each; one object serves all steps, and several threads.

    Parameters stay: leaves that require gradients, nn.Parameter, and their views. So do sparse tensors and subclasses. Others
    that live on anyway (buffers, inputs) may be excluded: they are found where they were in any case, but copied for nothing.
    A saved tensor that is changed in place before backward is an error, as it is without this. No CUDA graphs.

    Memory on the device: of the layer that runs, and of max_pending layers before it (on the CPU glibc keeps freed memory to
    itself unless MALLOC_MMAP_THRESHOLD_=1048576 is in the environment). On the host: of all saved storages
    (bf16: half of fp32; 8bit: 65/256 of fp32); with a folder, host_bytes and what is on its way.

    Args:
        exclude: tensors, or a module with its parameters and buffers, whose storages stay.
        device: whose tensors leave; those of other devices stay. By default "cuda" where there is a GPU, else "cpu": to a
            folder, or compressed.
        compression: None; "bf16": fp32 becomes bfloat16, to nearest (error at most 2^-8 of each element; above 3.39e38 it
            becomes infinity; what is not finite stays so); "8bit": fp32, bf16 and fp16 become blocks of 256 8-bit codes
            (Dettmers et al., arXiv 2110.02861), error at most 0.00704 of the largest magnitude in the block; a block with
            an element that is not finite comes back as NaN. Other dtypes are never compressed.
        prefetch: layers that are copied back ahead of backward.
        max_pending: layers whose copies may still be on their way when a later one begins; then forward waits for them.
        min_bytes: smaller storages stay.
        folder: of a swap file for what does not fit into host_bytes. A full disk is an error in forward that names the file;
            the step can be repeated.
        host_bytes: with a folder.

    Raises:
        RuntimeError: an argument out of range; the disk is full or fails; a saved tensor was changed in place.
    """

    def __init__(
        self,
        *,
        exclude: nn.Module | Iterable[Tensor] = (),
        device: torch.device | str | None = None,
        compression: Literal["bf16", "8bit"] | None = None,
        prefetch: int = 1,
        max_pending: int = 2,
        min_bytes: int = 4096,
        folder: str | None = None,
        host_bytes: int = 0,
    ) -> None:
        if host_bytes > 0 and folder is None:
            message = f"host_bytes: expected a folder for the rest, received {host_bytes} and none"
            raise ValueError(f"offload_activations: {message}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._store = torch.classes.shoestring.ActivationStore(
            str(device), compression or "none", prefetch, max_pending, min_bytes, folder or "", host_bytes
        )
        self.exclude(exclude)
        super().__init__(self._pack, torch.ops.shoestring.reload_activation)

    def exclude(self, tensors: nn.Module | Iterable[Tensor]) -> None:
        """These storages stay from now on."""
        if isinstance(tensors, nn.Module):
            tensors = [*tensors.parameters(), *tensors.buffers()]
        self._store.exclude(list(tensors))

    def mark(self) -> None:
        """A layer ends, and the next one begins. Without marks each saved storage is a layer of its own."""
        self._store.mark()

    def wait(self, bytes: int) -> None:
        """Waits until at most so many bytes of layers that are over are still there, on their way."""
        self._store.wait(bytes)

    def measure_link(self, bytes: int) -> dict[str, float]:
        """How quick copies are beside a computation, and what they take from it: the options of ``checkpoint_plan``, found by
        moving some (16 MiB on the CPU). With a folder and more ``bytes`` than ``host_bytes`` the disk's are meant."""
        names = ("out_bytes_per_second", "in_bytes_per_second", "copy_share", "prefetch")
        return dict(zip(names, self._store.measure_link(bytes), strict=True))

    def mark_layers(self, layers: Iterable[nn.Module]) -> list[torch.utils.hooks.RemovableHandle]:
        """Calls ``mark`` when one of these modules begins; returns what removes that."""
        return [layer.register_forward_pre_hook(lambda *_: self.mark()) for layer in layers]

    def statistics(self) -> dict[str, int]:
        """Bytes ``stored``, ``copied_out`` (encoded) and freed, and ``reloaded`` so far; now ``live`` in the slabs of the
        ``host``, and the size of the file on ``disk``; and how many storages there are (``entries``)."""
        return dict(self._store.statistics())

    def _pack(self, x: Tensor) -> torch.ScriptObject:
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
            self._store.exclude([x])
        result: torch.ScriptObject = torch.ops.shoestring.store_activation(self._store, x)
        return result
