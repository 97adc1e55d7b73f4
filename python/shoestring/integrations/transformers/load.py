"""Load a language model from a Hugging Face directory, and quantise each layer as it is read."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoestring.adapters.files import CONFIG as ADAPTER
from shoestring.adapters.targets import is_conv1d
from shoestring.adapters.tied import note_ties
from shoestring.checkpoint.blocks import find_blocks
from shoestring.checkpoint.tiled_layers import tile_layers
from shoestring.checkpoint.weights import OffloadedWeights, check_place, embeddings_and_head
from shoestring.core.errors import printable
from shoestring.core.fast_paths import set_fast_paths
from shoestring.core.remote_code import why_not_loaded
from shoestring.core.stacks import switch_to_codes
from shoestring.files.read_file import check_regular, is_integer
from shoestring.integrations.transformers.conversions import conversions
from shoestring.integrations.transformers.reader import (
    Made,
    Stored,
    TensorReader,
    read_config,
    stored_tensors,
)
from shoestring.quantization.quantize_4bit import CODES
from shoestring.quantization.quantized_keys import keys_of, read_keys
from shoestring.quantization.quantized_linear_module import (
    QuantizedLinear,
    check_dtype,
    check_form,
    frozen,
    quantize_weight,
)
from shoestring.quantization.quantized_stacks import (
    Stack,
    dense_stacks,
    hold_codes,
    quantize_slabs,
    split_by_refusal,
    warn_of_dense,
)
from shoestring.quantization.quantized_tensor import QuantizedTensor

METHOD = "load_quantized"
# Names of fields of config.json that hold a number of layers.
LAYER_COUNTS = {
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "num_encoder_layers", "encoder_layers",
    "decoder_layers", "depth", "num_blocks", "num_nextn_predict_layers", "mtp_num_hidden_layers",
}  # fmt: skip
# Up to this many layers or parameters are allowed without a check, since they are built quickly.
MOST_UNCHECKED = 1000
MOST_BUFFER = 1 << 31  # maximum size in bytes of a buffer that no file contains


def load_quantized(
    directory: str | os.PathLike[str],
    *,
    quant_type: str | None = None,
    block_size: int | None = None,
    double_quant: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    skip_modules: Sequence[str] = (),
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    to: str | None = None,
    keep: int = 0,
    tiles: Mapping[str, int] | None = None,
) -> nn.Module:
    """Load a transformers causal language model and quantise its linear weights one by one.

    transformers builds the model from config.json without memory for its weights. Each tensor is then read
    from the safetensors files. The weight of a linear layer is quantised directly from the read buffer, and the
    stacks of experts are quantised expert by expert, so the peak memory is the quantised model and one 16-bit weight.
    The experts then run by :func:`register_experts`, which reads codes. Files with a tensor for each expert
    load by the rules of transformers. The model is the same as if all weights were
    loaded in ``dtype`` and then quantised. If the configuration ties two weights, but the files store different
    values for them, both are loaded, and ``tie_word_embeddings`` of the model's configuration becomes False.

    Checkpoints that transformers saved with bitsandbytes' 4-bit or 8-bit layers load as they are, without
    bitsandbytes.

    Args:
        directory: a Hugging Face model directory: config.json, and model.safetensors or its shards with their
            index.
        quant_type: "nf4", "fp4", "int4" or "int8". None means "nf4", or for a quantised checkpoint its own
            type. The type of a quantised checkpoint cannot be changed.
        block_size: for 4 bits, the number of weights that share a scale, a power of two from 32 to 4096. None
            means 64.
        double_quant: for "nf4" and "fp4", store scales in 8 bits (double quantisation), which takes 4.127
            instead of 4.5 bits per weight.
        dtype: the dtype of weights that stay dense (embeddings, norms, biases, output head), and the dtype
            that quantised weights represent: fp32, bf16 or fp16.
        skip_modules: names of linear layers and experts that stay dense, besides the output head: full names, or
            their endings after a dot. A name of a module of experts or of one of its stacks stands for all its stacks.
        device: the device of the model; tensors are moved there one by one.
        trust_remote_code: whether to run the Python code that ``auto_map`` in the directory's config.json
            names.
        to: None, or where the weights of the model's blocks are while no block needs them, as for
            :func:`shoestring.offload_weights`: "cpu" or "nvme:DIR". The weights of a block leave as soon as they
            are read and quantised, so two blocks are in memory at most. So do the embedding and the output
            layer. ``requires_grad`` is False for them.
        keep: with ``to``, bytes of weights of blocks that stay in memory.
        tiles: with ``to``, linear layers of blocks that leave in tiles, with the most rows of a tile, as
            :func:`tile_layers` takes them. The other modules of their blocks leave one by one, too.

    Returns:
        The model in evaluation mode. With ``to``, ``OffloadedWeights.of(model)`` has the statistics. Each linear
        layer except the output head and ``skip_modules`` is a :class:`shoestring.nn.QuantizedLinear`.
        :func:`count_experts` returns how many experts are quantised. A warning names stacks of experts that stay dense, and
        why: their gate is none of :func:`moe_experts`, or blocks do not fit.

    Raises:
        ValueError: an option is out of range, or the directory does not fit: files are damaged, tensors are
            missing, surplus or of another shape than in config.json, another quantisation method was used, the
            directory also holds an adapter, the model has layers of the class Conv1D, or the code is not trusted.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> LlamaForCausalLM(config).save_pretrained("model")
        >>> model = shoestring.load_quantized("model", quant_type="nf4", double_quant=True)
        >>> model.model.layers[0].mlp.up_proj
        QuantizedLinear(in_features=64, out_features=64, bias=False, nf4, block_size=64, double_quant=True)
    """
    _check(quant_type, block_size, double_quant, dtype)
    if to is not None:
        check_place(to, keep)
    elif keep:
        raise ValueError(f"{METHOD}: keep: expected 0 without to, received {keep}")
    elif tiles:
        raise ValueError(f"{METHOD}: tiles: expected none without to, received {next(iter(tiles))}")
    folder = Path(directory)
    ready = _quantized_already(folder)
    if ready and (double_quant or block_size is not None or quant_type not in (None, *ready)):
        raise ValueError(
            f"{METHOD}: {folder}: its weights are {' or '.join(ready)} already: expected quant_type None, block_size None and "
            f"double_quant False, received {quant_type!r}, {block_size!r} and {double_quant!r}"
        )
    model, stored = _model_and_files(folder, dtype, trust_remote_code)
    switch_to_codes(model)
    layers, stacks = _to_quantize(model, skip_modules)
    transposed = next((name for name, module in model.named_modules() if is_conv1d(module)), None)
    if transposed is not None:
        raise ValueError(
            f"{METHOD}: {folder}: expected a model whose layers are nn.Linear, received {type(model).__name__}, of which "
            f"{transposed} is a Conv1D. Load it with from_pretrained of transformers; it stays dense"
        )
    stacks, reasons = split_by_refusal(stacks, quant_type or "nf4", block_size)
    candidates = [*(f"{name}.weight" for name in layers), *stacks, *reasons] if ready else []
    parts = {key: keys for key in candidates if (keys := keys_of(stored, key))}
    if not ready:
        warn_of_dense(METHOD, reasons)
    elif other := next((name for name in reasons if name in parts), None):
        raise ValueError(
            f"{METHOD}: {folder}: {other}: expected a dense stack, since {reasons[other]}; received codes"
        )
    tensors = _tensors(model)
    _check_tensors(model, tensors, stored, parts, folder)
    with TensorReader(stored) as reader:
        tensors = _by_values(model, tensors, reader, parts, folder)
        leaving = None if to is None else LeavingBlocks(model, torch.device(device), to, keep, tiles)
        for names, like in tensors:
            if leaving is not None:
                leaving.begin(names[0])
            layer = layers.get(names[0].removesuffix(".weight")) if len(names) == 1 else None
            stack = stacks.get(names[0]) if len(names) == 1 else None
            stored_name = next(name for name in names if name in stored)
            if names[0] in parts:
                codes: Any = _read_codes(reader, parts[names[0]], tuple(like.shape), dtype).to(device, dtype)
                if stack is not None:
                    hold_codes(stack, codes)
                elif layer is not None:
                    layer.weight = frozen(codes)
                    _make_quantized(layer)
            elif stack is not None and not ready:
                slabs = reader.slabs(stored_name)
                form = (quant_type or "nf4", block_size, double_quant)
                hold_codes(stack, quantize_slabs(slabs, like.shape, dtype, device, *form))
            elif layer is not None and not ready:
                layer.weight = frozen(reader.borrow(stored_name).to(device, dtype))
                quantize_weight(layer, quant_type or "nf4", block_size, double_quant)
                _make_quantized(layer)
            else:
                _set(model, names, reader.read(stored_name).to(device, like.dtype))
    if leaving is not None:
        leaving.begin("")
    _recreate_buffers(model, device)
    set_fast_paths(model)
    result: nn.Module = model.eval()
    return result


class LeavingBlocks:
    """Lets the weights of each block and table of a model leave as soon as they are all read.

    In a block with layers that leave in tiles, the modules leave one by one.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, to: str, keep: int, tiles: Mapping[str, int] | None
    ) -> None:
        self._model, self._tiles = model, dict(tiles or {})
        self._blocks: dict[str, nn.Module] = {}
        for name, block in find_blocks(model, None, METHOD).items():
            self._add(name, block)
        other = next((name for name in self._tiles if name not in self._blocks), None)
        if other is not None:
            raise ValueError(f"{METHOD}: tiles: expected names of linear layers of blocks, received {other}")
        # On the meta device, the parameters still require gradients, and a size decides later.
        self._tables: dict[str, Any] = {**embeddings_and_head(model)}
        self._weights = OffloadedWeights(model, device, to, keep)
        self._current = ""

    def _add(self, name: str, module: nn.Module) -> None:
        """Let a module leave as a whole, or the modules within it if some of them are tiled."""
        if name in self._tiles or not any(tiled.startswith(name + ".") for tiled in self._tiles):
            self._blocks[name] = module
        else:
            for child, part in module.named_children():
                self._add(f"{name}.{child}", part)

    def begin(self, tensor: str) -> None:
        """The tensor with this name comes next; "" stands for the end."""
        units = (*self._blocks, *self._tables)
        name = next((unit for unit in units if tensor.startswith(unit + ".")), "")
        if self._current not in ("", name):
            if self._current in self._blocks:
                self._take_block(self._current, self._blocks[self._current].requires_grad_(False))
            else:
                self._take_tables(self._tables[self._current].weight)
        self._current = name

    def _take_block(self, name: str, block: nn.Module) -> None:
        if name not in self._tiles:
            self._weights._take(name, block)
            return
        tile_layers(self._model, {name: self._tiles[name]})
        block._parameters = dict.fromkeys(
            block._parameters
        )  # frees the whole weight, of which the tiles have copies
        for number, tile in self._model.get_submodule(name).named_children():
            self._weights._take(f"{name}.{number}", tile)

    def _take_tables(self, weight: Any) -> None:
        """Let a weight leave, and let all modules that have it read it from where it is."""
        for name, module in self._tables.items():
            if module.weight is weight:
                self._weights._take_table(name, module)


def load_dense(
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a transformers causal language model tensor by tensor onto a device, without quantising it.

    The host never holds more than one tensor. See :func:`load_quantized` for arguments and errors.
    """
    folder = Path(directory)
    model, stored = _model_and_files(folder, dtype, trust_remote_code)
    tensors = _tensors(model)
    _check_tensors(model, tensors, stored, {}, folder)
    with TensorReader(stored) as reader:
        tensors = _by_values(model, tensors, reader, {}, folder)
        for names, like in tensors:
            name = next(name for name in names if name in stored)
            _set(model, names, reader.read(name).to(device, like.dtype))
    _recreate_buffers(model, device)
    result: nn.Module = model.eval()
    return result


def _model_and_files(
    folder: Path, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[Any, dict[str, Stored | Made]]:
    """Build the model on the meta device; return it, and where each of its tensors is stored, by name."""
    refuse_adapter(folder)
    stored = stored_tensors(folder)
    _check_layers(read_config(folder), len(stored), folder)
    model = _skeleton(folder, dtype, len(stored), trust_remote_code)
    return model, _by_model_names(model, stored, folder)


def refuse_adapter(folder: Path) -> None:
    """Raise ValueError if a folder holds an adapter beside the model, which would be left out, or is merged already."""
    if os.path.lexists(folder / ADAPTER):
        raise ValueError(
            f"{METHOD}: {folder}: expected a model, received an adapter, too ({ADAPTER}). Move the files of the adapter "
            "to a folder of their own, and load them with lora.load_adapter (--adapter), unless the model contains it already"
        )


def _check(quant_type: str | None, block_size: int | None, double_quant: bool, dtype: torch.dtype) -> None:
    check_form(METHOD, "nf4" if quant_type is None else quant_type, block_size, double_quant, before="None, ")
    check_dtype(METHOD, "dtype", dtype)


def _check_layers(fields: dict[str, Any], stored: int, folder: Path) -> None:
    """Raise ValueError if config.json has more layers than the files have tensors.

    The check runs before transformers builds anything, because a huge number of layers in config.json would
    make transformers create as many modules.
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            _check_layers(value, stored, folder)
        elif name in LAYER_COUNTS and is_integer(value) and value > max(stored, MOST_UNCHECKED):
            raise ValueError(
                f"{METHOD}: {folder}: config.json: {name}: expected at most the {stored} tensors of the weights, received {value}"
            )


@contextmanager
def _at_most(parameters: int) -> Iterator[None]:
    """Raise ValueError if a model built in the ``with`` block exceeds ``parameters`` parameters."""
    count = 0

    def register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal count
        count += 1
        if count > parameters:
            raise ValueError(f"more than {parameters} parameters, the weights have far fewer tensors")

    handle = register_module_parameter_registration_hook(register)
    try:
        yield
    finally:
        handle.remove()


def _skeleton(folder: Path, dtype: torch.dtype, stored: int, trust_remote_code: bool) -> Any:
    """Build the model on the meta device, with the directory's defaults for text generation."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"), _at_most(4 * stored + MOST_UNCHECKED):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
            _keep_precision(model, dtype)
    except Exception as error:
        raise ValueError(
            f"{METHOD}: {folder}: config.json does not describe a causal language model ({why_not_loaded(error)})"
        ) from None
    if os.path.lexists(folder / "generation_config.json"):
        where = f"{METHOD}: {folder}: generation_config.json"
        try:
            check_regular(folder / "generation_config.json", where)
            model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # GenerationConfig.from_pretrained may raise any exception
            raise ValueError(f"{where}: cannot be used ({why_not_loaded(error)})") from None
    return model


def _keep_precision(model: Any, dtype: torch.dtype) -> None:
    """Let tensors that transformers keeps in fp32 whatever the dtype of a model be fp32, such as biases of routers."""
    plan: dict[str, torch.dtype] = getattr(model, "_get_dtype_plan", lambda dtype: {})(dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        for pattern, kept in plan.items():
            if tensor.is_floating_point() and re.search(rf"(^|\.){pattern.replace('*', '.*')}(\.|$)", name):
                tensor.data = tensor.data.to(kept)


def _quantized_already(folder: Path) -> tuple[str, ...]:
    """Return the quantisation types that a checkpoint may have by its config.json; empty if it is dense."""
    fields = read_config(folder).get("quantization_config")
    if fields is None:
        return ()
    if not isinstance(fields, dict) or fields.get("quant_method") != "bitsandbytes":
        received = fields.get("quant_method") if isinstance(fields, dict) else fields
        raise ValueError(
            f"{METHOD}: {folder}: quantization_config: expected quant_method 'bitsandbytes', received {received!r}"
        )
    return ("int8",) if fields.get("load_in_8bit") else tuple(CODES)


def _to_quantize(model: Any, skip_modules: Sequence[str]) -> tuple[dict[str, nn.Linear], dict[str, Stack]]:
    """Return the linear layers and the stacks of experts to quantise, by name."""
    head = model.get_output_embeddings()
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m is not head}
    stacks = dense_stacks(model)
    for skip in skip_modules:
        skipped = [name for name in layers if name == skip or name.endswith("." + skip)]
        skipped_stacks = [
            name
            for name in stacks
            if any(part == skip or part.endswith("." + skip) for part in (name, name.rpartition(".")[0]))
        ]
        if not skipped and not skipped_stacks:
            raise ValueError(
                f"{METHOD}: skip_modules: expected names of linear layers or experts, received {skip!r}"
            )
        for name in skipped:
            del layers[name]
        # All stacks of a module have one format, so all of them stay dense.
        modules = {stacks[name].module for name in skipped_stacks}
        stacks = {name: stack for name, stack in stacks.items() if stack.module not in modules}
    return layers, stacks


def _by_model_names(model: Any, stored: dict[str, Stored], folder: Path) -> dict[str, Stored | Made]:
    """Return the tensors in the files, or what makes them, by the names that they have in the model.

    In files of a base model without output head, the names lack the prefix of the base model.
    """
    prefix = model.base_model_prefix + "."
    if not any(name.startswith(prefix) for name in stored):
        roots = {name.partition(".")[0] for name in model.state_dict()}
        stored = {n if n.partition(".")[0] in roots else prefix + n: tensor for n, tensor in stored.items()}
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    names, rules = conversions(model, shapes, f"{METHOD}: {folder}")
    found: dict[str, Stored | Made] = {}
    for name, in_model in names.items():
        if in_model in found:
            raise ValueError(
                f"{METHOD}: {folder}: expected one tensor for {in_model}, received {found[in_model].name} and {name}"
            )
        found[in_model] = stored[name]
    for rule in rules:
        found |= {name: Made(name, shape, rule, stored, model) for name, shape in rule.shapes.items()}
    return found


def _tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return each parameter and persistent buffer with all its names. Tied parameters have several names."""
    groups: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(groups.values())


def _check_tensors(
    model: Any,
    tensors: list[tuple[list[str], Tensor]],
    stored: Mapping[str, Stored | Made],
    parts: dict[str, list[str]],
    folder: Path,
) -> None:
    """Raise unless the files hold exactly the tensors of the model's architecture, in the same shapes."""
    missing = [names[0] for names, _ in tensors if not any(name in stored for name in names)]
    if missing:
        raise ValueError(
            f"{METHOD}: {folder}: {len(missing)} weight(s) of the architecture are missing, the first is {missing[0]}"
        )
    for names, like in tensors:
        for name in names:
            if name not in stored or name in parts:
                continue
            if stored[name].shape != tuple(like.shape):
                raise ValueError(
                    f"{METHOD}: {folder}: {name} has shape {list(stored[name].shape)} in the weights, but config.json asks "
                    f"for {list(like.shape)}"
                )
    # Files of older versions of transformers contain buffers that today's models compute. These buffers do
    # not count as surplus tensors.
    known = [
        *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        r"rotary_emb\.inv_freq",
        "position_ids",
    ]
    used = {name for names, _ in tensors for name in names} | {
        part for keys in parts.values() for part in keys
    }
    surplus = [name for name in stored if name not in used and not any(re.search(p, name) for p in known)]
    if surplus:
        raise ValueError(
            f"{METHOD}: {folder}: {len(surplus)} tensor(s) of the weights are not in the architecture, the first is "
            f"{printable(min(surplus))}"
        )


def _by_values(
    model: nn.Module,
    tensors: list[tuple[list[str], Tensor]],
    reader: TensorReader,
    parts: dict[str, list[str]],
    folder: Path,
) -> list[tuple[list[str], Tensor]]:
    """Split the names of each tied tensor into groups for which the files store the same values; untie the model.

    Names that are not stored stay with the first stored one, usually that of the embedding.

    Raises:
        ValueError: the files store different values for one module.
    """
    untied: list[tuple[list[str], Tensor]] = []
    for names, like in tensors:
        stored_names = [name for name in names if name in reader.stored]
        equal: dict[bytes, list[str]] = {}
        for name in stored_names if len(stored_names) > 1 else []:
            equal.setdefault(_digest(name, like.dtype, reader, parts), []).append(name)
        groups = list(equal.values()) or [[]]
        owners: dict[tuple[nn.Module, str], list[str]] = {}
        for group in groups:
            for name in group:
                parent, _, child = name.rpartition(".")
                owner = owners.setdefault((model.get_submodule(parent), child), group)
                if owner is not group:
                    raise ValueError(
                        f"{METHOD}: {folder}: expected the same values for {owner[0]} and {name}, which are one tensor of "
                        f"{type(model).__name__}, received different ones"
                    )
        for group in groups[1:]:
            _set(model, group, torch.empty_like(like))
        first = [name for name in names if name in groups[0] or name not in stored_names or not equal]
        untied += [(first, like), *((group, like) for group in groups[1:])]
    if len(untied) > len(tensors):
        note_ties(model)
    return untied


def _digest(name: str, dtype: torch.dtype, reader: TensorReader, parts: dict[str, list[str]]) -> bytes:
    """Return a digest of the values of a stored tensor in ``dtype``, or of the parts of a quantised weight."""
    quantised = parts.get(name)
    digest = hashlib.sha256()
    for stored in quantised or [name]:
        tensor = reader.borrow(stored)
        tensor = tensor if quantised else tensor.to(dtype)
        digest.update(repr((tensor.shape, tensor.dtype)).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _read_codes(
    reader: TensorReader, keys: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype
) -> QuantizedTensor:
    """Read a quantised weight that files hold in several tensors, of which the first has its name."""
    key = keys[0]
    codes = read_keys({name: reader.read(name) for name in keys}, key, shape, dtype, METHOD)
    if codes is None:
        raise ValueError(
            f"{METHOD}: {key}: expected the tensors that bitsandbytes saves for a quantised weight, "
            f"received {', '.join(sorted(keys))}"
        )
    return codes


def _make_quantized(layer: nn.Linear) -> None:
    layer.__class__ = QuantizedLinear
    layer.compute_dtype = None  # type: ignore[assignment]


def _set(model: nn.Module, names: Sequence[str], tensor: Tensor) -> None:
    """Set a parameter or buffer under all its names, which share it."""
    parameter: nn.Parameter | None = None
    for name in names:
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if child in parent._parameters:
            if parameter is None:
                parameter = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            parent._parameters[child] = parameter
        else:
            parent._buffers[child] = tensor


def _recreate_buffers(model: Any, device: torch.device | str) -> None:
    """Let the model compute the buffers that no file contains, such as rotary frequencies."""
    meta_buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
    if not meta_buffers:
        return
    for name, buffer in meta_buffers.items():
        if buffer.nbytes > MOST_BUFFER:
            raise ValueError(
                f"{METHOD}: {type(model).__name__}: the buffer {name}, which config.json asks for, has {buffer.nbytes} bytes; "
                f"expected at most {MOST_BUFFER}"
            )
    for name, buffer in meta_buffers.items():
        empty = float("nan") if buffer.is_floating_point() else 0
        _set(model, [name], torch.full_like(buffer, empty, device=device))
    done = [
        t
        for t in (*model.parameters(), *model.buffers())
        if not any(t is model.get_buffer(name) for name in meta_buffers)
    ]
    for tensor in done:
        tensor._is_hf_initialized = True
    with torch.no_grad():
        model.initialize_weights()
    for tensor in done:
        del tensor._is_hf_initialized
    for name in meta_buffers:
        if model.get_buffer(name).isnan().any():
            raise ValueError(
                f"{METHOD}: {type(model).__name__}: the buffer {name} is in no file, and the model does not make it"
            )
