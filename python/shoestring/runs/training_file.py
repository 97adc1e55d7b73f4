"""Save a whole training run to one file, and restore it, in the format of ``shoestring::save_training`` in C++."""

from __future__ import annotations

import functools
import json
import operator
import os
import random
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoestring.core.dtensors import is_dtensor
from shoestring.files.read_file import is_integer, parse_json, shown
from shoestring.files.safetensors_file import Gathered, checksum_of, open_safetensors, save_gathered
from shoestring.optim import files as optimizer_files
from shoestring.optim import torch_files
from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.host_copy import HostCopy, call_all
from shoestring.optim.parameter_names import names_of
from shoestring.optim.several import several
from shoestring.optim.sharded import piece_of
from shoestring.optim.sharded_state import gathered
from shoestring.runs.part_state import joined, joined_like, split

FORMAT, VERSION = "shoestring.training", "2"
# In version 1, which C++ writes, no part has a key in ``kinds``. Python wrote the values of its parts as plain JSON.
READ = ("1", "2")
# Arguments of save_training that a part cannot be called, and what they are.
ARGUMENTS = {
    "step": "a whole number of at least 0",
    "position": "whole numbers by name",
    "facts": "texts by name",
    "frozen": "True or False",
}


class Stateful(Protocol):
    """An object whose state a run saves: a scheduler, a GradScaler, a callback."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers, and values that JSON can hold."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Restore what ``state_dict`` has returned."""
        ...


@dataclass(frozen=True)
class TrainingPosition:
    """The position of a run that has been restored.

    Attributes:
        step: the number of steps that have been taken.
        position: the numbers that ``save_training`` got as ``position``.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> shoestring.save_training("run.safetensors", model, step=3, position={"epoch": 1, "row": 96})
        >>> shoestring.load_training("run.safetensors", model)
        TrainingPosition(step=3, position={'epoch': 1, 'row': 96})
    """

    step: int
    position: dict[str, int] = field(default_factory=dict)


def save_training(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    step: int = 0,
    position: Mapping[str, int] | None = None,
    facts: Mapping[str, str] | None = None,
    frozen: bool = False,
    **parts: Stateful,
) -> None:
    """Save a training run to the safetensors file ``path``, so that it can be continued bit for bit.

    The file has the trained weights and the buffers of the model, including weights that are frozen by now but have
    state in an optimizer, and adapters that are not active; the state of the optimizers, the states of the
    generators of random numbers (of PyTorch on the CPU and on all accelerators, of Python and of NumPy), and the state
    of each part. C++ reads and writes the same file. An existing file is replaced once the new one is complete and on
    disk, so a process that is killed meanwhile leaves the old file.

    If processes have split the state of an optimizer (``shoestring.distributed.shard``) or the weights (FSDP2), all of
    them must call this function. The first writes the file, which is that of one process, and any number of processes
    can continue the run, with or without DTensors. Of what is split, a process has one whole tensor at a time while it
    saves, and while it loads it reads its part of the state of an optimizer of ``shoestring.optim``.

    Args:
        path: the file to write.
        model: the model. Tied weights are saved once.
        optimizers: one optimizer or several, of ``shoestring.optim``, ``torch.optim`` or elsewhere.
        step: the number of steps that have been taken.
        position: whole numbers that say where in the data the run is, such as the epoch.
        facts: texts that must be the same when the run is resumed, such as a digest of the data.
        frozen: also save all other weights that are not trained. A run that trains some of them later needs it, or
            that has trained some with an optimizer without state.
        parts: other objects with ``state_dict`` and ``load_state_dict``, by a name that you choose: a scheduler, a
            GradScaler, averages, callbacks. It cannot be the name of an argument above.

    Raises:
        ValueError: an argument has another type, two parts have names of which one begins the other (``a`` and
            ``a.b``), a part has averages of DTensors, or the file cannot hold a state. It holds dense tensors, numbers, texts, None, and lists,
            tuples and dicts of these. Each comes back with its type.
        OSError: the file cannot be written. An existing file is unchanged then.

    Example:
        >>> from shoestring.optim import schedules
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = shoestring.optim.AdamW(model.parameters(), lr=1e-3)
        >>> scheduler = schedules.Scheduler(optimizer, lr=schedules.cosine(100))
        >>> shoestring.save_training("run.safetensors", model, optimizer, step=3, schedule=scheduler)
        >>> shoestring.load_training("run.safetensors", model, optimizer, schedule=scheduler).step
        3
    """
    _check_arguments("save_training", step=step, position=position, facts=facts, frozen=frozen)
    _check_parts(parts, "save_training")
    known: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    trained = set(_adapter_parameters(model))
    states: dict[str, Tensor | Gathered] = {}
    descriptions = []
    for number, optimizer in enumerate(several(optimizers)):
        state, metadata = _files_of(optimizer).store(optimizer, "save_training", names_of(optimizer, known))
        trained |= _parameters_with(state, optimizer)
        states |= {f"optimizer.{number}.{name}": tensor for name, tensor in state.items()}
        descriptions.append(metadata)
    tensors: dict[str, Tensor | Gathered] = {}
    also = sorted(known[p] for p in trained if p in known and not p.requires_grad and not frozen)
    for name, tensor in _tensors_of(model, frozen, also, "save_training").items():
        tensors[f"model.{name}"] = gathered(tensor) if is_dtensor(tensor) else tensor
    tensors |= states
    writes = all(o._core.writes() for o in several(optimizers) if isinstance(o, LowMemoryOptimizer))
    if any(isinstance(tensor, Gathered) for tensor in tensors.values()):
        writes = torch.distributed.get_rank() == 0
    if not writes:
        checksum_of(tensors, {}, writes=False)
        save_gathered(path, tensors, {}, writes=False)
        return
    values: dict[str, dict[str, Any]] = {}
    kinds: dict[str, dict[str, str]] = {}
    for name, part in parts.items():
        part_tensors, values[name], kinds[name] = split(part.state_dict(), f"save_training: {name}")
        tensors |= {f"part.{name}.{key}": tensor for key, tensor in part_tensors.items()}
    generators, numbers = random_states()
    metadata = {
        "format": FORMAT,
        "format_version": VERSION,
        "step": str(_whole(step)),
        "position": json.dumps({key: _whole(value) for key, value in (position or {}).items()}),
        "facts": json.dumps(dict(facts or {})),
        "optimizers": json.dumps(descriptions),
        "parts": json.dumps(values),
        "kinds": json.dumps(kinds),
        "random": json.dumps(numbers),
    }
    if also:
        metadata["also"] = json.dumps(also)
    _described(metadata, "save_training")  # raises for content that could not be read back
    tensors |= {f"random.{name}": state for name, state in generators.items()}
    metadata["checksum"] = checksum_of(tensors, metadata, writes=True)
    save_gathered(path, tensors, metadata, writes=True)


def load_training(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    facts: Mapping[str, str] | None = None,
    frozen: bool = False,
    **parts: Stateful,
) -> TrainingPosition:
    """Restore a run from a file that ``save_training`` has written, in Python or in C++.

    The state of a parameter is found by the name that the parameter has in the model, so optimizers may have the
    parameters of a group in another order than before. Parameters outside the model have the names of
    ``AdamW(named_parameters)``, or else their order.

    Args:
        path: the file to read.
        model: as in ``save_training``; also optimizers, frozen and parts.
        optimizers: see ``model``.
        facts: texts that the file must have. Each is compared with the one that was saved.
        frozen: see ``model``.
        parts: see ``model``.

    Returns:
        The number of steps that have been taken, and the position in the data.

    Raises:
        ValueError: the file is damaged, or belongs to another model, optimizer or set of facts, or the parts are not
            those of the file, or refuse their state. Everything is as it was then. If an object also refuses the
            state that it had, the error names it, and all others are as they were.
        OSError: the file cannot be read. If the disk fails between the check of the whole file and the reading of the
            weights, weights that have been read remain.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> facts = {"data": "digest of the corpus"}
        >>> shoestring.save_training("run.safetensors", model, optimizer, step=3, facts=facts)
        >>> resumed = shoestring.load_training("run.safetensors", model, optimizer, facts=facts)
        >>> resumed.step
        3
    """
    where = f"load_training: {os.fspath(path)}"
    file = open_safetensors(path, f"{where}: expected a safetensors file, received a damaged one")
    metadata, entries = file.metadata(), file.tensors()
    if metadata.get("format") != FORMAT or metadata.get("format_version") not in READ:
        raise ValueError(
            f"{where}: expected a file of save_training, format_version {' or '.join(READ)}, received another file"
        )
    checksum = file.checksum()
    if metadata.get("checksum") != checksum:
        raise ValueError(
            f"{where}: expected the checksum {metadata.get('checksum')}, received {checksum}: it is damaged"
        )
    _check_arguments("load_training", facts=facts, frozen=frozen)
    _check_parts(parts, "load_training")
    saved = _described(metadata, where)
    for name, now in (facts or {}).items():
        stored = saved["facts"].get(name)
        if stored != now:
            raise ValueError(
                f"{where}: expected {name} {now}, received {stored}: the file belongs to another run"
            )
    known: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    also = {*saved["also"], *(known[p] for p in _adapter_parameters(model) if p in known)}
    also = {name for name in also if f"model.{name}" in entries}
    tensors = _tensors_of(model, frozen, also, "load_training")
    _check_tensors(tensors, entries, where)
    if saved["parts"].keys() != parts.keys():
        raise ValueError(
            f"{where}: expected the parts {sorted(parts)}, received a file with the parts {sorted(saved['parts'])}"
        )
    all_optimizers = several(optimizers)
    if len(saved["optimizers"]) != len(all_optimizers):
        raise ValueError(
            f"{where}: expected {len(all_optimizers)} optimizers, received a file with {len(saved['optimizers'])}"
        )

    undo: list[tuple[str, Callable[[], object]]] = []
    try:
        for number, optimizer in enumerate(all_optimizers):
            undo.append((f"optimizer {number}", HostCopy([], [optimizer]).restore))
            state = optimizer_files.load_all(file, f"optimizer.{number}.", optimizer)
            params = names_of(optimizer, known)
            _files_of(optimizer).restore(optimizer, state, saved["optimizers"][number], where, params)
            del state
        for name, part in parts.items():
            undo.append((f"the part {name}", HostCopy([], [part]).restore))
            part_tensors, values = optimizer_files.load_all(file, f"part.{name}."), saved["parts"][name]
            if saved["kinds"] is None:
                loaded = joined_like(part_tensors, values, part.state_dict(), f"{where}: {name}")
            else:
                loaded = joined(part_tensors, values, saved["kinds"][name], f"{where}: {name}")
            part.load_state_dict(loaded)
        undo.append(("random numbers", functools.partial(set_random_states, *random_states())))
        set_random_states(optimizer_files.load_all(file, "random."), saved["random"])
        # The file has been read and checked as a whole, so these reads succeed unless the disk fails.
        for name, tensor in tensors.items():
            if is_dtensor(tensor):
                tensor.to_local().copy_(piece_of(file.load(f"model.{name}"), tensor))
            else:
                file.load_into(f"model.{name}", tensor)
    except BaseException as error:
        _put_back(undo, where, error)
        if isinstance(error, (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError)):
            raise ValueError(
                f"{where}: expected the content of save_training, received another ({type(error).__name__}: {error})"
            ) from error
        raise
    return TrainingPosition(int(saved["step"]), {key: int(value) for key, value in saved["position"].items()})


def _put_back(undo: list[tuple[str, Callable[[], object]]], where: str, reason: BaseException) -> None:
    """Undo what has been done, each step also if another one fails. Raise ValueError if one does."""
    refused: list[str] = []

    def attempt(what: str, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:
            refused.append(f"{what} ({type(error).__name__}: {error})")

    call_all(functools.partial(attempt, what, step) for what, step in reversed(undo))
    if refused:
        raise ValueError(
            f"{where}: {type(reason).__name__}: {reason}. Everything is as it was but {' and '.join(refused)}, which "
            "refused the state that it had. Make it anew"
        ) from reason


def _whole(value: object) -> int:
    """Return a whole number, also one of NumPy or a tensor, as an int. Raise TypeError for anything else."""
    if isinstance(value, bool):
        raise TypeError("a truth value")
    return operator.index(value)  # type: ignore[arg-type]


def _check_arguments(what: str, **received: Any) -> None:
    """Raise ValueError if an argument, such as a part that has its name, is of another type."""

    def fits(name: str, value: Any) -> bool:
        if name == "frozen":
            return isinstance(value, bool)
        if name == "step":
            return 0 <= _whole(value) < 2**63
        pairs = {} if value is None else value
        if not isinstance(pairs, Mapping) or not all(isinstance(key, str) for key in pairs):
            return False
        if name == "facts":
            return all(isinstance(text, str) for text in pairs.values())
        return all(is_integer(_whole(number)) for number in pairs.values())

    for name, value in received.items():
        try:
            good = fits(name, value)
        except TypeError:
            good = False
        if not good:
            raise ValueError(
                f"{what}: {name}: expected {ARGUMENTS[name]}, received {shown(value)}. A part needs another name"
            )


def _check_parts(parts: Mapping[str, Stateful], what: str) -> None:
    """Raise ValueError if the tensors of two parts could have one name, or a part has the name of an argument."""
    for name in parts:
        if name in ARGUMENTS:
            raise ValueError(
                f"{what}: parts: expected another name than {name}, which is an argument of save_training"
            )
        if getattr(parts[name], "_is_split", False):
            raise ValueError(
                f"{what}: {name}: expected averages of whole weights, received some of DTensors, of which each process has "
                "its own part. Save them with torch.distributed.checkpoint"
            )
        for other in parts:
            if other.startswith(f"{name}."):
                raise ValueError(
                    f"{what}: parts: expected names of which none begins another, received {name} and {other}. Rename one"
                )


def _adapter_parameters(model: nn.Module) -> Iterator[Tensor]:
    """Return the parameters of all adapters of ``shoestring.lora``, of which only active ones require gradients."""
    for module in model.modules():
        adapters, tensors = getattr(module, "adapters", None), getattr(module, "tensors", None)
        if isinstance(adapters, dict) and callable(tensors):
            for name in adapters:
                yield from tensors(name).values()


def _parameters_with(state: Iterable[str], optimizer: Optimizer) -> set[Tensor]:
    """Return the parameters of which ``state``, in the layout of a file, has entries ``<group>.<index>.<name>``."""
    indices = {tuple(index) for name in state if len(index := name.split(".", 2)[:2]) == 2}
    return {
        p
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if (str(g), str(i)) in indices
    }


def _files_of(optimizer: Optimizer) -> Any:
    """Return the module that stores and restores an optimizer of this class."""
    return optimizer_files if isinstance(optimizer, LowMemoryOptimizer) else torch_files


def _tensors_of(model: nn.Module, frozen: bool, also: Container[str], what: str) -> dict[str, Tensor]:
    """Return the tensors of a model that a run saves, by name: with ``frozen`` all, else those trained and ``also``."""
    tensors = {n: p.detach() for n, p in model.named_parameters() if frozen or p.requires_grad or n in also}
    persistent = model.state_dict(keep_vars=True).keys()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            continue
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device.type == "meta":
            kind = "on the meta device" if tensor.device.type == "meta" else type(tensor).__name__
            raise ValueError(f"{what}: model: {name}: expected a dense tensor, received one that is {kind}")
        _check_memory(tensor, f"{what}: model: {name}", writes=what == "load_training")
    return tensors


def _check_memory(tensor: Tensor, where: str, writes: bool) -> None:
    """Raise ValueError if a tensor cannot be read, or if ``writes`` written."""
    try:
        tensor.data_ptr()
    except RuntimeError as error:
        raise ValueError(
            f"{where}: expected a weight on its device, received one that is away ({error}). Call undo() of offload_weights "
            "before"
        ) from None
    if writes and torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(
            f"{where}: expected a tensor with memory for each element, received an expanded one. Clone it"
        )


def _check_tensors(tensors: Mapping[str, Tensor], entries: Mapping[str, Tensor], where: str) -> None:
    names = {name.removeprefix("model.") for name in entries if name.startswith("model.")}
    if names != tensors.keys():
        first = min(names ^ tensors.keys())
        which = "the file" if first in names else "this model"
        raise ValueError(
            f"{where}: expected the tensors of this model, received {shown(first)} in {which} alone"
        )
    for name, tensor in tensors.items():
        stored = entries[f"model.{name}"]
        if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise ValueError(
                f"{where}: {name}: expected {tuple(tensor.shape)} {tensor.dtype}, "
                f"received {tuple(stored.shape)} {stored.dtype}"
            )


def _json(metadata: Mapping[str, str], key: str, where: str) -> Any:
    return parse_json(
        metadata.get(key, "").encode(), f"{where}: expected JSON called {key}, received another value"
    )


def _described(metadata: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return what the metadata says of a run. Raises ValueError if a value has another type."""
    saved = {key: _json(metadata, key, where) for key in ("position", "facts", "optimizers", "parts", "step")}
    saved["random"] = _json(metadata, "random", where) if "random" in metadata else {}
    # The names of weights that were frozen, and are in the file all the same. C++ writes none.
    saved["also"] = _json(metadata, "also", where) if "also" in metadata else []
    saved["kinds"] = None if metadata["format_version"] == READ[0] else _json(metadata, "kinds", where)

    def maps(value: object, fits: Callable[[object], bool]) -> bool:
        return isinstance(value, dict) and all(map(fits, value.values()))

    def is_text(value: object) -> bool:
        return isinstance(value, str)

    good = {
        "position": maps(saved["position"], is_integer),
        "facts": maps(saved["facts"], is_text),
        "optimizers": isinstance(saved["optimizers"], list)
        and all(maps(o, is_text) for o in saved["optimizers"]),
        "parts": maps(saved["parts"], lambda part: isinstance(part, dict)),
        "also": isinstance(saved["also"], list) and all(map(is_text, saved["also"])),
        "step": is_integer(saved["step"]) and saved["step"] >= 0,
        "kinds": saved["kinds"] is None
        or (
            maps(saved["kinds"], lambda kinds: maps(kinds, is_text))
            and isinstance(saved["parts"], dict)
            and saved["kinds"].keys() == saved["parts"].keys()
        ),
        "random": isinstance(saved["random"], dict),
    }
    for key, is_good in good.items():
        if not is_good:
            raise ValueError(f"{where}: expected the {key} of a run, received {shown(saved[key])}")
    return saved


# ---- random numbers


def _devices() -> Iterable[tuple[str, Any, int]]:
    """Return the name, the module of PyTorch and the index of each accelerator that this process uses."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", lambda: True)():
        return []
    return [(f"{accelerator.type}.{i}", module, i) for i in range(torch.accelerator.device_count())]


def random_states() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of all generators: tensors, and values for JSON."""
    tensors = {"cpu": torch.get_rng_state()}
    tensors |= {name: module.get_rng_state(i) for name, module, i in _devices()}
    version, words, gauss = random.getstate()
    tensors["python"] = torch.tensor(words, dtype=torch.int64)
    values: dict[str, Any] = {"python": [version, gauss]}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        tensors["numpy"] = torch.from_numpy(keys.astype("int64"))
        values["numpy"] = [name, *(value.item() if hasattr(value, "item") else value for value in rest)]
    return tensors, values


def set_random_states(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    if "cpu" in tensors:
        torch.set_rng_state(tensors["cpu"])
    for name, module, i in _devices():
        if name in tensors:
            module.set_rng_state(tensors[name], i)
    if "python" in tensors and "python" in values:
        version, gauss = values["python"]
        random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in tensors and "numpy" in values:
        name, *rest = values["numpy"]
        numpy.random.set_state((name, tensors["numpy"].numpy().astype("uint32"), *rest))
