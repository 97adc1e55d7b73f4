"""Offload saved activations to host memory or a disk between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from shoestring.core.device import default_device
from shoestring.core.storages import parts


class offload_activations(torch.autograd.graph.saved_tensors_hooks):
    """A context manager that offloads the tensors that autograd saves, and copies them back for backward::

        offload = shoestring.offload_activations(exclude=model.buffers())
        for batch in batches:
            with offload:
                loss = model(batch)
            loss.backward()
            optimizer.step()

    Copies overlap with the computation. Each storage is copied once, however many saved tensors are views of
    it. A storage is freed on the device when it has been copied and its layer has ended. The storages of the
    last layer stay on the device; backward prefetches those of the layers before it. Without compression all
    gradients are bitwise the same as without offload. Host memory (pinned for CUDA) is allocated in the first
    step and reused in later steps. One object serves all steps, and several threads.

    Parameters stay on the device: leaves that require gradients, nn.Parameter, and their views. Sparse
    tensors and tensor subclasses stay, too. Exclude other tensors that stay alive on the device anyway, such
    as buffers and inputs. Without ``exclude``, such tensors are copied, although backward does not need the
    copies. As without offload, it is an error to change a saved tensor in place before backward. CUDA graphs
    are not supported.

    Device memory: the activations of the running layer and of max_pending layers before it. On the CPU, glibc
    returns freed memory to the system only with MALLOC_MMAP_THRESHOLD_=1048576 in the environment. Host
    memory: all saved storages (bf16: half of fp32; 8bit: 65/256 of fp32). With a folder, host memory is
    limited to host_bytes and the copies in flight.

    Args:
        exclude: tensors, or a module with its parameters and buffers, whose storages stay on the device.
        device: the device whose tensors are offloaded; tensors of other devices stay. Defaults to PyTorch's
            accelerator, such as "cuda", else to "cpu", which is useful with a folder or with compression.
        compression: None, "bf16" or "8bit". "bf16" rounds fp32 to nearest bfloat16: the error is at most 2^-8
            of each element, values above 3.39e38 become infinity, and values that are not finite stay so.
            "8bit" stores fp32, bf16 and fp16 as blocks of 256 8-bit codes (Dettmers et al., arXiv
            2110.02861): the error is at most 0.00704 of the largest magnitude in the block, and a block with
            an element that is not finite becomes NaN. Other dtypes are never compressed. The order in which
            storages are saved decides which of them backward reads compressed, not the speed of the copies:
            equal steps of one thread have bitwise equal gradients. The storages of the last layer and of the
            max_pending layers before it stay on the device as they are, and so do storages that something
            else holds.
        prefetch: the number of layers that are copied back ahead of backward.
        max_pending: the number of layers whose copies may still be in flight when a later layer begins; if
            there are more, forward waits. With compression, these layers stay until then even if their copies
            have ended.
        min_bytes: storages of fewer bytes stay on the device.
        folder: the folder of a swap file for storages that do not fit into host_bytes. A full disk raises an
            error in forward that names the file; the step can be repeated.
        host_bytes: with a folder, the maximum host memory in bytes.

    Raises:
        ValueError: host_bytes is given without a folder.
        RuntimeError: an argument is out of range, the disk is full or fails, or a saved tensor was changed in
            place.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        >>> offload = shoestring.offload_activations(exclude=model, device="cpu", compression="bf16")
        >>> with offload:
        ...     loss = model(torch.randn(64, 64)).square().mean()
        >>> loss.backward()
        >>> model[0].weight.grad.shape
        torch.Size([64, 64])
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
            message = (
                "host_bytes: expected a folder for tensors beyond this limit, "
                f"received {host_bytes} and no folder"
            )
            raise ValueError(f"offload_activations: {message}")
        if device is None:
            device = default_device()
        self._store = torch.classes.shoestring.ActivationStore(
            str(device), compression or "none", prefetch, max_pending, min_bytes, folder or "", host_bytes
        )
        self.exclude(exclude)
        super().__init__(self._pack, torch.ops.shoestring._reload_activation)

    def exclude(self, tensors: nn.Module | Iterable[Tensor]) -> None:
        """Keep the storages of these tensors on the device from now on."""
        if isinstance(tensors, nn.Module):
            tensors = [*tensors.parameters(), *tensors.buffers()]
        # Operators save the codes of a quantised weight, not the weight.
        self._store.exclude(list(parts(tensors)))

    def mark(self) -> None:
        """End a layer and begin the next one. If ``mark`` is never called, each saved storage is a layer."""
        self._store.mark()

    def wait(self, bytes: int) -> None:
        """Wait until layers whose forward has ended hold at most ``bytes`` bytes on the device."""
        self._store.wait(bytes)

    def measure_link(self, bytes: int) -> dict[str, float]:
        """Measure the speed of copies that run beside a computation, and how much they slow it down.

        The measurement copies some data (16 MiB on the CPU). If there is a folder and ``bytes`` exceeds
        ``host_bytes``, it measures the disk instead of host memory.

        Returns:
            The keyword arguments of ``checkpoint_plan`` that describe the copies.
        """
        names = ("out_bytes_per_second", "in_bytes_per_second", "copy_share", "prefetch")
        return dict(zip(names, self._store.measure_link(bytes), strict=True))

    def mark_layers(self, layers: Iterable[nn.Module]) -> list[torch.utils.hooks.RemovableHandle]:
        """Call ``mark`` before each forward of these modules; return handles that remove the hooks."""
        return [layer.register_forward_pre_hook(lambda *_: self.mark()) for layer in layers]

    def statistics(self) -> dict[str, int]:
        """Return counters of bytes and of storages.

        - ``stored``, ``copied_out`` (compressed bytes that were freed on the device) and ``reloaded`` are
          total bytes so far.
        - ``host`` is the size of the host buffers, ``live`` the bytes in use of these buffers, and ``disk``
          the size of the swap file.
        - ``entries`` is the number of storages that the object holds now.
        """
        return dict(self._store.statistics())

    def _pack(self, x: Tensor) -> torch.ScriptObject:
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
            self._store.exclude([x])
        result: torch.ScriptObject = torch.ops.shoestring._store_activation(self._store, x)
        return result
