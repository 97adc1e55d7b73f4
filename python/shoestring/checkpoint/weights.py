"""Keep the weights of a model's blocks in host memory or in a file while no block needs them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoestring.checkpoint.blocks import find_blocks
from shoestring.core.errors import InputError
from shoestring.core.presence import BRINGS_WEIGHTS, PRESENT, Presence

OWNER = "_shoestring_offloaded_weights"
# Storages of fewer bytes stay on the device. Among them are the weights of norms, which the block before may read.
LEAST = 1 << 16


def offload_weights(
    model: nn.Module,
    to: str,
    *,
    keep: int = 0,
    blocks: Sequence[str | type | nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> OffloadedWeights:
    """Keep the weights of a model's blocks away from the device while no block needs them.

    The weights of a block arrive while the block before it runs, in forward and in backward, and leave when a
    later block needs the room. Two blocks are on the device at a time, besides those that stay, and a third
    one while changed weights are written. Results are bitwise the same as without offloading. All other
    weights stay on the device: the embedding, the output layer, and weights of less than 64 KiB, such as
    those of norms.

    Frozen weights travel one way: dense ones and the codes and scales of nf4, fp4, int4 and int8. Weights
    that require gradients stay, unless ``optimizer`` is given. It steps each weight within backward, while
    the block is there, and the new weights then travel back.

    ``state_dict()`` returns copies in host memory. ``load_state_dict`` changes the weights where they are. A
    weight that is read while it is away raises an error; see :meth:`OffloadedWeights.present`.

    Args:
        model: the model, with all weights of its blocks on one device.
        to: "cpu" for host memory (pinned, for a GPU), or "nvme:DIR" for a file in the folder DIR. The file
            is read past the page cache where the file system allows it. It has no name, so it is gone when
            the process ends.
        keep: bytes of weights of blocks that stay on the device. The first blocks stay.
        blocks: the blocks, as for ``checkpoint_model``; None: all modules of the model's lists of modules of
            one class. They must run in this order.
        optimizer: an optimizer of shoestring with ``step_in_backward=True``. Its ``offload`` may be None,
            "stream" or "nvme:DIR", since with "cpu" weights are stepped outside of backward.

    Returns:
        A handle with statistics, and with ``undo()``.

    Raises:
        ValueError: ``to``, ``keep``, ``blocks`` or ``optimizer`` does not fit.
        RuntimeError: the folder has no room for the weights. Nothing has changed then.

    Example:
        >>> blocks = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 128), blocks).requires_grad_(False)
        >>> offloaded = shoestring.offload_weights(model, "nvme:.")
        >>> model(torch.randn(2, 8)).shape
        torch.Size([2, 128])
        >>> offloaded.statistics()["away"]
        262144
        >>> offloaded.undo()
    """
    check_place(to, keep)
    _check_optimizer(optimizer)
    if hasattr(model, OWNER):
        raise InputError(
            f"offload_weights: model: expected one whose weights are here, received a {type(model).__name__} "
            "whose weights are offloaded already; call undo() first"
        )
    found = find_blocks(model, blocks, "offload_weights")
    weights = _weights_of(found, optimizer is not None)
    everywhere = _storages(model, found)
    tensors = [t for frozen, trained in weights.values() for t in (*frozen, *trained)]
    devices = {t.device for t in tensors}
    if not devices:
        raise InputError(
            "offload_weights: model: expected blocks with frozen weights, received weights that all require "
            "gradients; call requires_grad_(False), or pass an optimizer with step_in_backward=True"
        )
    if len(devices) > 1:
        raise InputError(
            "offload_weights: model: expected blocks on one device, received some on "
            f"{' and '.join(sorted(map(str, devices)))}"
        )
    handle = OffloadedWeights(model, devices.pop(), to, keep)
    try:
        for name, (frozen, trained) in weights.items():
            own = [[t for t in group if everywhere[_key(t)] == {name}] for group in (frozen, trained)]
            handle._add(name, found[name], *own)
    except BaseException:
        handle.undo()
        raise
    return handle


def check_place(to: str, keep: int) -> None:
    if to != "cpu" and (not to.startswith("nvme:") or to == "nvme:"):
        raise InputError(f"offload_weights: to: expected cpu or nvme:DIR, received {to!r}")
    if keep < 0:
        raise InputError(f"offload_weights: keep: expected a number of bytes of at least 0, received {keep}")


class OffloadedWeights:
    """The weights of a model that are away from its device; ``offload_weights`` returns it.

    Example:
        >>> blocks = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3)))
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 128), blocks).requires_grad_(False)
        >>> offloaded = shoestring.offload_weights(model, "nvme:.")
        >>> with offloaded.present(blocks[2]):
        ...     _ = blocks[2].weight.mul_(0.5)
        >>> shoestring.OffloadedWeights.of(model) is offloaded
        True
    """

    def __init__(self, model: nn.Module, device: torch.device, to: str, keep: int) -> None:
        self._model = model
        self._store = torch.classes.shoestring.WeightStore(device, to.partition(":")[2], keep)
        self._indices: dict[nn.Module, int] = {}
        self._hooks: list[Any] = []
        setattr(model, OWNER, self)

    @staticmethod
    def of(model: nn.Module) -> OffloadedWeights:
        """Return the object that belongs to a model, for example to one from ``load_quantized(to=...)``."""
        found = getattr(model, OWNER, None)
        if found is None:
            raise InputError(
                f"OffloadedWeights: model: expected one with offloaded weights, received a {type(model).__name__} "
                "without"
            )
        handle: OffloadedWeights = found
        return handle

    @contextmanager
    def present(self, block: nn.Module, changed: bool = True) -> Iterator[None]:
        """A context within which the weights of a block are on the device, to read or change them.

        Args:
            block: one of the offloaded blocks.
            changed: False if the weights are only read. Otherwise they are written back.
        """
        if block not in self._indices:
            raise InputError(
                f"OffloadedWeights: present: block: expected one of the {len(self._indices)} offloaded blocks, "
                f"received a {type(block).__name__}"
            )
        self._store.open(self._indices[block])
        try:
            yield
        finally:
            self._store.close(self._indices[block], changed)

    def statistics(self) -> dict[str, int]:
        """Return figures in bytes.

        - ``fetched`` to the device and ``written`` back so far.
        - ``away``: the weights of all blocks that do not stay; ``device``: those of them that are on the
          device now; ``host``: host memory; ``disk``: the size of the file.
        """
        return dict(self._store.statistics())

    def undo(self) -> None:
        """Bring all weights back to the device, and leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        for block in self._indices:
            block.__dict__.pop(BRINGS_WEIGHTS, None)
            for module in block.modules():
                module.__dict__.pop(PRESENT, None)
        self._hooks.clear()
        self._store.restore()
        self._indices.clear()
        if getattr(self._model, OWNER, None) is self:
            delattr(self._model, OWNER)

    def _take(self, name: str, block: nn.Module) -> None:
        """Let the frozen weights of one more block leave, which runs after the blocks so far.

        A loader calls it as soon as it has read the weights of the block. So they are never all in memory.
        """
        frozen, _ = _weights_of({name: block}, with_trained=False)[name]
        self._add(name, block, frozen, [])

    def _add(self, name: str, block: nn.Module, frozen: list[Tensor], trained: list[Tensor]) -> None:
        """Let the weights of the next block leave, and call the store when the block runs."""
        store = self._store
        index = self._indices[block] = store.add(name, frozen, trained)
        block.__dict__[BRINGS_WEIGHTS] = True
        presence = Presence(functools.partial(self.present, block, changed=False))
        for module in block.modules():
            module.__dict__[PRESENT] = presence

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            store.enter(index, _tensors((args, kwargs)))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            store.leave(index, _tensors(output))

        def before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            store.open(index)

        def after_saving(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for key, value in state.items():
                if key.startswith(prefix) and isinstance(value, Tensor):
                    state[key] = value.detach().cpu().clone()
            store.close(index, False)

        def before_loading(*_: Any) -> None:
            store.open(index)

        def after_loading(*_: Any) -> None:
            store.close(index, True)

        self._hooks += [
            block.register_forward_pre_hook(enter, with_kwargs=True),
            block.register_forward_hook(leave, with_kwargs=True, always_call=True),
            block.register_state_dict_pre_hook(before_saving),
            block._register_state_dict_hook(after_saving),
            block._register_load_state_dict_pre_hook(before_loading),
            block.register_load_state_dict_post_hook(after_loading),
        ]


def _check_optimizer(optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is None:
        return
    if not getattr(optimizer, "step_in_backward", False):
        raise InputError(
            "offload_weights: optimizer: expected an optimizer of shoestring with step_in_backward=True, "
            f"received {type(optimizer).__name__} without it"
        )
    if getattr(optimizer, "offload", None) == "cpu":
        raise InputError(
            "offload_weights: optimizer: expected offload=None, 'stream' or 'nvme:DIR', received 'cpu', which "
            "steps weights after backward of their block"
        )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _inner(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold the data of a tensor: itself, or those inside a subclass."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [inner for name in names for inner in _inner(getattr(tensor, name))]
    return [tensor]


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _weights_of(
    blocks: dict[str, nn.Module], with_trained: bool
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Return the frozen and the trained tensors of each block that may leave, without repeated storages."""
    found = {}
    for name, block in blocks.items():
        frozen: dict[int, Tensor] = {}
        trained: dict[int, Tensor] = {}
        for tensor in (*block.parameters(), *block.buffers()):
            if tensor.requires_grad and not with_trained:
                continue
            for inner in _inner(tensor.detach() if tensor.requires_grad else tensor):
                if inner.device.type != "meta" and inner.untyped_storage().nbytes() >= LEAST:
                    (trained if tensor.requires_grad else frozen)[_key(inner)] = inner
        found[name] = (list(frozen.values()), list(trained.values()))
    return found


def _storages(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[int, set[str]]:
    """Return for each storage of the model the blocks that have it; "" stands for the rest of the model."""
    owner_of = {module: name for name, block in blocks.items() for module in block.modules()}
    owners: dict[int, set[str]] = {}
    for module in model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for tensor in own:
            for inner in _inner(tensor):
                owners.setdefault(_key(inner), set()).add(owner_of.get(module, ""))
    return owners
