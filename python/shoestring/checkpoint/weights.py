"""Keep the weights of a model's blocks in host memory or in a file while no block needs them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoestring.checkpoint.blocks import find_blocks, listed_blocks
from shoestring.checkpoint.conversions import allow_conversions, refuse_conversions
from shoestring.checkpoint.embedding_rows import RowsOnDemand, bring_rows
from shoestring.checkpoint.tiled_layers import Tile, TiledLayer
from shoestring.core.errors import InputError
from shoestring.core.module_argument import check_module
from shoestring.core.presence import BRINGS_WEIGHTS, PRESENT, Presence
from shoestring.core.stacks import reads_stacks, stacks_of
from shoestring.core.storages import parts, storages, tensors_in
from shoestring.quantization.quantized_tensor import QuantizedTensor

OWNER = "_shoestring_offloaded_weights"
# Storages of fewer bytes stay on the device. Among them are the weights of norms, which the block before may read.
LEAST = 1 << 16


def offload_weights(
    model: nn.Module,
    to: str,
    *,
    keep: int = 0,
    blocks: Sequence[str | type | nn.Module] | None = None,
    tables: Sequence[str | nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
) -> OffloadedWeights:
    """Keep the weights of a model's blocks away from the device while no block needs them.

    The weights of a block arrive while the block before it runs, in forward and in backward, and leave when a
    later block needs the room. Two blocks are on the device at a time, besides those that stay, and a third
    one while changed weights are written. Results are bitwise the same as without offloading. Weights of less
    than 64 KiB, such as those of norms, stay on the device.

    Frozen embeddings and the output layer are *tables*. An embedding reads only the rows that it needs. The
    loss of a patched model, :func:`shoestring.linear_cross_entropy` and ``linear_distillation`` read the
    weight of the output layer about 16 MiB at a time, once in forward and once more for the gradients, for each
    chunk of tokens (``workspace_mb``). On the CPU their results are bitwise those of a weight in memory, if
    no chunk has fewer than 8 tokens and AMX does not take the tiles of small models; on a GPU, sums over the
    classes are rounded in another order. An output layer whose module runs, as in generation, is on the
    device as a whole meanwhile.

    On the CPU, the frozen stacks of ``nn.Experts``, and of transformers' experts that :func:`register_experts` runs,
    arrive by expert: an expert without tokens is not read. The experts of a forward are read ahead for its backward, and
    for the next forward if they are at least half of all.

    Frozen weights travel one way: dense ones and the codes and scales of nf4, fp4, int4 and int8. Weights
    that require gradients stay, unless ``optimizer`` is given. It steps each weight within backward, while
    the block is there, and the new weights then travel back, also of weights that are unfrozen later. Without
    ``optimizer``, the forward of a block raises an error if a weight that has left requires gradients.

    ``state_dict()`` returns copies in host memory. ``load_state_dict`` changes the weights where they are. A
    weight of a block is there in forward and backward of the block and within :meth:`OffloadedWeights.present`.
    Everywhere else, a read or a write raises an error, and ``half()``, ``to()`` and other conversions are refused
    before they change anything. In forward, a change in place is written back if PyTorch counts it as a version of
    the tensor, so not one of ``weight.data``.

    Args:
        model: the model, with all weights of its blocks on one device.
        to: "cpu" for host memory (pinned, for a GPU), or "nvme:DIR" for a file in the folder DIR. The file
            is read past the page cache where the file system allows it. It has no name, so it is gone when
            the process ends.
        keep: bytes of weights of blocks that stay on the device. The first blocks stay.
        blocks: the blocks, as for ``checkpoint_model``; None: all modules of the model's lists of modules of
            one class. They must run in this order.
        tables: names or modules of the tables; None: all frozen embeddings outside of the blocks, and the output
            layer that ``get_output_embeddings()`` returns. They leave whatever ``keep`` is; ``tables=()`` lets
            them stay.
        optimizer: an optimizer of shoestring with ``step_in_backward=True``. Its ``offload`` may be None,
            "stream" or "nvme:DIR", since with "cpu" weights are stepped outside of backward.
        param_init_fn: for a model of which blocks and tables are on the meta device: a function that gives one
            block or table, its argument, its weights. It is called just before these weights leave, so they are
            never all in memory. If it raises an error, the weights so far are lost.

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
    check_module("offload_weights", model)
    check_place(to, keep)
    _check_optimizer(optimizer)
    if hasattr(model, OWNER):
        raise InputError(
            f"offload_weights: model: expected one whose weights are here, received a {type(model).__name__} "
            "whose weights are offloaded already; call undo() first"
        )
    steps = optimizer is not None
    block_modules = _find_blocks_and_tiles(model, blocks)
    table_modules = find_tables(model, tables, block_modules)
    if param_init_fn is not None:
        return _offload_while_made(model, block_modules, table_modules, to, keep, steps, param_init_fn)
    weights = _weights_of(block_modules, steps)
    everywhere = owners_of_storages(model, block_modules)
    tensors = [t for kinds in weights.values() for kind in kinds for t in kind]
    devices = {t.device for t in tensors}
    if not devices:
        raise InputError(
            f"offload_weights: model: expected blocks with frozen weights of at least {LEAST} bytes, received weights "
            "that all require gradients or are smaller; call requires_grad_(False), or pass an optimizer with "
            "step_in_backward=True"
        )
    if len(devices) > 1:
        raise InputError(
            "offload_weights: model: expected blocks on one device, received some on "
            f"{' and '.join(sorted(map(str, devices)))}"
        )
    handle = OffloadedWeights(model, devices.pop(), to, keep, steps)
    try:
        for name, kinds in weights.items():
            exclusive = [[t for t in kind if everywhere[_key(t)] == {name}] for kind in kinds]
            handle._add(name, block_modules[name], *exclusive)
        for name, table in table_modules.items():
            # A block that has the weight, too, would need all of it.
            if everywhere[_key(table.weight)] == {""}:  # type: ignore[arg-type]
                handle._add_table(name, table)
    except BaseException:
        handle.undo()
        raise
    return handle


def _offload_while_made(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    tables: dict[str, nn.Module],
    to: str,
    keep: int,
    with_trained: bool,
    param_init_fn: Callable[[nn.Module], Any],
) -> OffloadedWeights:
    """Let the weights of each block and table leave as soon as ``param_init_fn`` has made them."""
    handle: OffloadedWeights | None = None
    try:
        for name, module in (blocks | tables).items():
            param_init_fn(module)
            meta_name = next((key for key, p in module.named_parameters() if p.device.type == "meta"), None)
            if meta_name is not None:
                raise InputError(
                    f"offload_weights: param_init_fn: expected weights for {name}, received none for {meta_name}, which "
                    "is still on the meta device"
                )
            if handle is None:
                handle = OffloadedWeights(model, next(module.parameters()).device, to, keep, with_trained)
            if name in tables:
                handle._add_table(name, module)
            else:
                handle._add(name, module, *_weights_of({name: module}, with_trained)[name])
    except BaseException:
        if handle is not None:
            handle._detach()  # the weights so far need not fit into memory, so they do not come back
        raise
    if handle is None:
        raise InputError("offload_weights: blocks: expected at least one block, received none")
    return handle


def _find_blocks_and_tiles(
    model: nn.Module, blocks: Sequence[str | type | nn.Module] | None
) -> dict[str, nn.Module]:
    """Return the blocks by name, in the order in which they run.

    Each tile of a layer is a block by itself. So are the other submodules of a block with a tiled layer.
    """
    if not any(isinstance(module, TiledLayer) for module in model.modules()):
        return find_blocks(model, blocks, "offload_weights")
    has_blocks = blocks is not None or listed_blocks(model)
    found = find_blocks(model, blocks, "offload_weights") if has_blocks else {}
    result = {}

    def visit(name: str, module: nn.Module, is_inside: bool) -> None:
        is_inside = is_inside or name in found
        if isinstance(module, Tile) or (
            is_inside and not any(isinstance(part, TiledLayer) for part in module.modules())
        ):
            if any(p.nbytes >= LEAST for p in module.parameters()):
                result[name] = module
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child, is_inside)

    visit("", model, False)
    return result


def is_table(module: nn.Module) -> bool:
    """Return whether a module can be a table: a frozen embedding or linear layer with a dense weight."""
    weight: Any = getattr(module, "weight", None)
    return (
        isinstance(module, (nn.Embedding, nn.Linear))
        and type(weight) in (Tensor, nn.Parameter)
        and not weight.requires_grad
        and weight.numel() * weight.element_size() >= LEAST
        and getattr(module, "max_norm", None) is None  # max_norm changes the weight in forward
    )


def embeddings_and_head(model: nn.Module) -> dict[str, nn.Module]:
    """Return all embeddings of a model, and the output layer that it names, in the order of the model."""
    of_model: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = of_model()
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding) or m is head}


def find_tables(
    model: nn.Module, tables: Sequence[str | nn.Module] | None, blocks: dict[str, nn.Module]
) -> dict[str, nn.Module]:
    """Return the modules of a model that are tables, by name, in the order of the model."""
    inside = {module for block in blocks.values() for module in block.modules()}
    outside = {name: module for name, module in model.named_modules() if module not in inside}
    if tables is None:
        candidates = embeddings_and_head(model)
        return {name: module for name, module in candidates.items() if name in outside and is_table(module)}
    names = {module: name for name, module in outside.items()}
    chosen = {}
    for table in tables:
        module = outside.get(table) if isinstance(table, str) else table if table in names else None
        if module is None or not is_table(module):
            raise InputError(
                "offload_weights: tables: expected frozen embeddings or linear layers outside of the blocks, with "
                f"a dense weight of at least {LEAST} bytes, received "
                f"{repr(table) if isinstance(table, str) else type(table).__name__}"
            )
        chosen[names[module]] = module
    return chosen


def is_place(to: str) -> bool:
    """Return whether ``to`` says where weights can be: "cpu", or "nvme:DIR" with a folder."""
    return to == "cpu" or (to.startswith("nvme:") and to != "nvme:")


def check_place(to: str, keep: int) -> None:
    if not is_place(to):
        raise InputError(f"offload_weights: to: expected cpu or nvme:DIR, received {to!r}")
    if keep < 0:
        raise InputError(f"offload_weights: keep: expected a number of bytes of at least 0, received {keep}")


def bytes_here(model: nn.Module) -> int:
    """Return the bytes of a model's weights and buffers, without those that are away from its device now."""
    size = sum(storages([*model.parameters(), *model.buffers()]).values())
    if not hasattr(model, OWNER):
        return size
    figures = OffloadedWeights.of(model).statistics()
    # Weights that are away are whole pages, of which a model may have more than it has other weights.
    return max(0, size - figures["away"]) + figures["device"]


class OffloadedWeights:
    """The weights of a model that are away from its device; ``offload_weights`` returns it.

    ``place`` is where they are, as ``to`` of ``offload_weights``, and ``keep`` is how many bytes stay.

    Example:
        >>> blocks = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3)))
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 128), blocks).requires_grad_(False)
        >>> offloaded = shoestring.offload_weights(model, "nvme:.")
        >>> with offloaded.present(blocks[2]):
        ...     _ = blocks[2].weight.mul_(0.5)
        >>> shoestring.OffloadedWeights.of(model) is offloaded
        True
    """

    def __init__(
        self, model: nn.Module, device: torch.device, to: str, keep: int, steps: bool = False
    ) -> None:
        self._model = model
        self.place, self.keep = to, keep
        self._store = torch.classes.shoestring.WeightStore(device, to.partition(":")[2], keep, steps)
        self._indices: dict[nn.Module, int] = {}
        self._tables: dict[int, int] = {}  # key of a table's storage -> index
        self._hooks: list[Any] = [model._register_load_state_dict_pre_hook(_refuse_assignment)]
        setattr(model, OWNER, self)
        refuse_conversions(model)

    @staticmethod
    def of(model: nn.Module) -> OffloadedWeights:
        """Return the object that belongs to a model, for example to one from ``load_quantized(to=...)``."""
        handle: OffloadedWeights | None = getattr(model, OWNER, None)
        if handle is None:
            raise InputError(
                f"OffloadedWeights: model: expected one with offloaded weights, received a {type(model).__name__} "
                "without"
            )
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
                f"OffloadedWeights: present: block: expected one of the {len(set(self._indices.values()))} offloaded "
                f"blocks and tables, received a {type(block).__name__}"
            )
        # An interrupt between the call and ``try`` destroys the result, which ends the use of the block.
        opened = self._store.open(self._indices[block], changed)
        try:
            yield
        finally:
            opened.close()

    def statistics(self) -> dict[str, int]:
        """Return figures in bytes.

        - ``fetched`` to the device and ``written`` back so far.
        - ``away``: the weights of all blocks that do not stay; ``device``: those of them that are on the
          device now; ``host``: host memory; ``disk``: the size of the file.
        """
        return dict(self._store.statistics())

    def read_seconds(self) -> float:
        """Return the time to bring all weights that are away to the device, computed from that of some blocks."""
        blocks = {self._indices[block]: block for block in self._indices}
        read, began = self.statistics()["fetched"], time.perf_counter()
        for index in sorted(blocks)[:: max(1, len(blocks) // 4)]:
            with self.present(blocks[index], changed=False):
                pass
        seconds = time.perf_counter() - began
        figures = self.statistics()
        fetched = figures["fetched"] - read  # nothing if these blocks are on the device
        return seconds * figures["away"] / fetched if fetched else 0.0

    def undo(self) -> None:
        """Bring all weights back to the device, and leave the model as it was."""
        self._store.restore()
        self._detach()
        self._indices.clear()
        self._tables.clear()

    def _detach(self) -> None:
        """Remove everything from the model that calls the store."""
        for hook in self._hooks:
            hook.remove()
        for block in self._indices:
            block.__dict__.pop(BRINGS_WEIGHTS, None)
            if isinstance(block.__dict__.get("weight"), RowsOnDemand):
                del block.__dict__["weight"]
            for module in block.modules():
                module.__dict__.pop(PRESENT, None)
        self._hooks.clear()
        if getattr(self._model, OWNER, None) is self:
            delattr(self._model, OWNER)
            allow_conversions(self._model)

    def _take(self, name: str, block: nn.Module) -> None:
        """Let the frozen weights of one more block leave, which runs after the blocks so far.

        A loader calls it as soon as it has read the weights of the block. So they are never all in memory.
        """
        self._add(name, block, *_weights_of({name: block}, with_trained=False)[name])

    def _take_table(self, name: str, table: nn.Module) -> None:
        """Let the weight of a table leave as soon as a loader has read it, if the module can be a table."""
        weight: Any = table.weight
        if weight.numel() * weight.element_size() >= LEAST and is_table(table.requires_grad_(False)):
            self._add_table(name, table)

    def _add_table(self, name: str, table: nn.Module) -> None:
        """Let the weight of a table leave. Tied modules share one table."""
        weight: Any = table.weight
        key = _key(weight)
        if key not in self._tables:
            self._tables[key] = self._store.add_table(name, weight)
        index = self._tables[key]
        if isinstance(table, nn.Embedding):
            self._indices[table] = index
            self._hooks += bring_rows(self._store, table)
            table.__dict__[PRESENT] = Presence(functools.partial(self.present, table, changed=False))
            self._hooks += self._files_hooks(table, index)
        else:
            self._bring(index, table)

    def _add(
        self, name: str, block: nn.Module, frozen: list[Tensor], trained: list[Tensor], stacks: list[Tensor]
    ) -> None:
        """Let the weights of the next block leave, and call the store when the block runs."""
        self._bring(self._store.add(name, frozen, trained, stacks), block)

    def _bring(self, index: int, block: nn.Module) -> None:
        """Call the store when a block runs, or is read or changed as a whole."""
        store = self._store
        self._indices[block] = index
        block.__dict__[BRINGS_WEIGHTS] = True
        presence = Presence(functools.partial(self.present, block, changed=False))
        for module in block.modules():
            module.__dict__[PRESENT] = presence

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            store.enter(index, tensors_in((args, kwargs)))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            store.leave(index, tensors_in(output))

        self._hooks += [
            block.register_forward_pre_hook(enter, with_kwargs=True),
            block.register_forward_hook(leave, with_kwargs=True, always_call=True),
            *self._files_hooks(block, index),
        ]

    def _files_hooks(self, block: nn.Module, index: int) -> list[Any]:
        """Let ``state_dict()`` and ``load_state_dict`` bring the weights of a block."""
        store = self._store

        def before_saving(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            store.begin(index, False)

        def after_saving(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for key, value in state.items():
                if key.startswith(prefix) and isinstance(value, Tensor):
                    state[key] = value.detach().cpu().clone()
            store.end(index)

        def before_loading(state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
            _refuse_assignment(state, prefix, metadata)
            store.begin(index, True)

        def after_loading(*_: Any) -> None:
            store.end(index)

        return [
            block.register_state_dict_pre_hook(before_saving),
            block._register_state_dict_hook(after_saving),
            block._register_load_state_dict_pre_hook(before_loading),
            block.register_load_state_dict_post_hook(after_loading),
        ]


def _refuse_assignment(state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Raise InputError for ``load_state_dict(assign=True)``, which would put weights in place of those that are away."""
    if metadata.get("assign_to_params_buffers"):
        raise InputError(
            "offload_weights: load_state_dict: expected assign=False while weights are away, received True. Call undo() "
            "first, or leave assign out."
        )


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
    if callable(getattr(optimizer, "eval", None)):
        raise InputError(
            "offload_weights: optimizer: expected an optimizer that changes weights in its steps alone, received "
            f"{type(optimizer).__name__}, whose train() and eval() change all weights. Use another optimizer."
        )


def _key(tensor: Tensor) -> int:
    """Return a number that tensors of one storage share."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _weights_of(
    blocks: dict[str, nn.Module], with_trained: bool
) -> dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """Return the frozen and the trained tensors, and the stacks, of each block that may leave.

    No storage is repeated.
    """
    tensors = {}
    for name, block in blocks.items():
        stacks = {_key(stack): stack for module in block.modules() for stack in _stacks_of(module)}
        frozen: dict[int, Tensor] = {}
        trained: dict[int, Tensor] = {}
        for tensor in (*block.parameters(), *block.buffers()):
            if tensor.requires_grad and not with_trained:
                continue
            for inner in parts([tensor]):
                if _key(inner) not in stacks and _may_leave(inner):
                    (trained if tensor.requires_grad else frozen)[_key(inner)] = inner
        tensors[name] = (list(frozen.values()), list(trained.values()), list(stacks.values()))
    return tensors


def _may_leave(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.untyped_storage().nbytes() >= LEAST


def _stacks_of(module: nn.Module) -> list[Tensor]:
    """Return the frozen stacks of a module of which its forward reads some matrices; codes and scales are two stacks."""
    if not reads_stacks(module):
        return []
    return [
        part
        for _, stack in stacks_of(module)
        if not stack.requires_grad and type(stack) in (nn.Parameter, QuantizedTensor)
        for part in parts([stack])
        if part.dim() > 1 and part.shape[0] == stack.shape[0] and part.is_contiguous()
        if _may_leave(part) and part.nbytes == part.untyped_storage().nbytes()
    ]


def owners_of_storages(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[int, set[str]]:
    """Return for each storage of the model the blocks that have it; "" stands for the rest of the model."""
    owner_of = {module: name for name, block in blocks.items() for module in block.modules()}
    owners: dict[int, set[str]] = {}
    for module in model.modules():
        for key in storages((*module.parameters(recurse=False), *module.buffers(recurse=False))):
            owners.setdefault(key, set()).add(owner_of.get(module, ""))
    return owners
