"""C++ and Python write the same bytes for quantised model files, and both read files of bitsandbytes."""

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from build_folder import program
from shoestring.integrations.transformers.reader import TensorReader, stored_tensors
from shoestring.nn import QuantizedLinear

# (input features, output features, bias) of layers. In some weights each row consists of whole blocks, in
# others blocks span rows. One weight has an odd number of elements, one has one element, and one has more
# than 256 blocks.
LAYERS = {"whole": (128, 96, True), "straddling": (100, 7, False), "odd": (33, 3, True), "one": (1, 1, False),
          "many": (256, 160, False)}  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {"quant_type": "nf4"},
    {"quant_type": "nf4", "double_quant": True},
    {"quant_type": "fp4", "block_size": 32},
    {"quant_type": "fp4", "block_size": 128, "double_quant": True},
    {"quant_type": "int4"},
    {"quant_type": "int8"},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def dense(dtype: torch.dtype) -> nn.ModuleDict:
    torch.manual_seed(0)
    layers = {
        name: nn.Linear(into, out, bias=bias, dtype=dtype) for name, (into, out, bias) in LAYERS.items()
    }
    with torch.no_grad():
        # For weights this small, the JSON text of the mean of the scales needs an exponent.
        layers["whole"].weight.mul_(1e-6)
        layers["many"].weight[3] = 0  # a row of zeros gives blocks whose scale is zero
    return nn.ModuleDict(layers)


def quantized(model: nn.ModuleDict, **form: Any) -> nn.ModuleDict:
    return nn.ModuleDict(
        {name: QuantizedLinear.from_linear(linear, **form) for name, linear in model.items()}
    )


def save(state: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})


def arguments(source: Path, target: Path, dtype: str = "file", layers: dict[str, tuple[int, int, bool]] = LAYERS,
              quant_type: str = "none", block_size: int = 64, double_quant: bool = False) -> list[str]:  # fmt: skip
    described = ";".join(f"{name},{into},{out},{bias:d}" for name, (into, out, bias) in layers.items())
    return [str(source), str(target), quant_type, str(block_size), str(int(double_quant)), dtype, described]


def run(*models: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*program("model_file"), *itertools.chain(*models)], capture_output=True, text=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpp_quantises_and_writes_what_python_does(dtype: torch.dtype, tmp_path: Path) -> None:
    model = dense(dtype)
    save(model.state_dict(), tmp_path / "dense.safetensors")
    targets = [tmp_path / f"cpp-{i}" for i in range(len(FORMS))]
    done = run(
        *(arguments(tmp_path / "dense.safetensors", target, **form) for form, target in zip(FORMS, targets))
    )
    assert done.returncode == 0, done.stderr
    for form, target in zip(FORMS, targets):
        save(quantized(model, **form).state_dict(), tmp_path / "python.safetensors")
        expected, received = (
            (tmp_path / "python.safetensors").read_bytes(),
            (target / "model.safetensors").read_bytes(),
        )
        assert received == expected, form


def test_cpp_reads_what_python_writes(tmp_path: Path) -> None:
    models = [quantized(dense(dtype), **form) for form in FORMS for dtype in DTYPES]
    sources = [tmp_path / str(i) / "model.safetensors" for i in range(len(models))]
    targets = [tmp_path / f"cpp-{i}" for i in range(len(models))]
    for model, source in zip(models, sources):
        save(model.state_dict(), source)
    done = run(*(arguments(source, target) for source, target in zip(sources, targets)))
    assert done.returncode == 0, done.stderr
    for source, target in zip(sources, targets):
        assert (target / "model.safetensors").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_cpp_reads_what_bitsandbytes_writes(nested: bool, storage: torch.dtype, tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(128, 96, quant_type="nf4", compress_statistics=nested, quant_storage=storage)
    layer = layer.to("cpu")
    save(
        {f"whole.{name}": tensor for name, tensor in layer.state_dict().items()}, tmp_path / "bnb.safetensors"
    )
    done = run(arguments(tmp_path / "bnb.safetensors", tmp_path / "cpp", layers={"whole": LAYERS["whole"]}))
    assert done.returncode == 0, done.stderr
    ours = QuantizedLinear(128, 96)
    state = load_file(tmp_path / "cpp" / "model.safetensors")
    ours.load_state_dict({name.removeprefix("whole."): tensor for name, tensor in state.items()})
    x = torch.randn(5, 128)
    assert torch.allclose(ours(x), layer(x), atol=1e-5)
    assert torch.equal(
        ours.weight.dequantize(), bnb.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
    )


def test_types_of_what_stays_dense(tmp_path: Path) -> None:
    save(dense(torch.float32).state_dict(), tmp_path / "dense.safetensors")
    done = run(arguments(tmp_path / "dense.safetensors", tmp_path / "none", "bf16"),
               arguments(tmp_path / "dense.safetensors", tmp_path / "nf4", "bf16", quant_type="nf4"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = dense(torch.float32).to(torch.bfloat16).state_dict()
    received = load_file(tmp_path / "none" / "model.safetensors")
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], expected[name]) for name in expected)
    nf4 = load_file(tmp_path / "nf4" / "model.safetensors")
    assert nf4["whole.bias"].dtype == torch.bfloat16
    python = quantized(dense(torch.float32), quant_type="nf4").state_dict()
    # The quantised codes come from the fp32 values in the file, not from values rounded to bf16.
    assert torch.equal(nf4["many.weight"], python["many.weight"])
    assert b'"dtype": "bfloat16"' in bytes(nf4["many.weight.quant_state.bitsandbytes__nf4"].tolist())


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"many.weight": torch.zeros(7, 1, dtype=torch.uint8)}, "\"many.weight\": expected 20480 bytes, received 7"),
        ({"many.weight.absmax": None}, "\"many.weight\": expected \"many.weight.absmax\" beside it, received none"),
        ({"many.weight.absmax": torch.zeros(640)}, "\"many.weight.absmax\": expected 640 elements of Byte, received 640 of Float"),
        ({"many.weight.nested_absmax": torch.zeros(4)}, "expected 3 elements of Float, received 4"),
        ({"many.weight.quant_map": torch.zeros(16)}, "\"many.weight.quant_map\": expected the nf4 values"),
        ({"state": b"{}"}, "expected JSON with quant_type, blocksize"),
        ({"state": b"[" * 4000}, "expected JSON with quant_type, blocksize"),
        ({"state": b" " * 5000}, "expected at most 4096 bytes of JSON, received 5000"),
        ({"state": (b"[160, 256]", b"[256, 160]")}, "expected shape [160, 256], received [256,160]"),
        ({"state": (b"\"blocksize\": 64", b"\"blocksize\": 63")}, "block_size: expected a power of two"),
        ({"state": (b"\"blocksize\": 64", b"\"blocksize\": 1e99")}, "expected JSON with quant_type, blocksize"),
        ({"state": (b"float32\", \"shape", b"int4\", \"shape")}, "dtype: expected float32, bfloat16 or float16, received \"int4\""),
        ({"state": (b"\"nf4\"", b"\"fp4\"")}, "quant_type: expected nf4, received \"fp4\""),
        ({"state": (b"ed_blocksize\": 256", b"ed_blocksize\": 128")}, "nested_blocksize: expected 256, received 128"),
    ],
)  # fmt: skip
@pytest.mark.sample(5)
def test_damaged_keys(change: dict[str, Any], part: str, tmp_path: Path) -> None:
    state = quantized(dense(torch.float32), quant_type="nf4", double_quant=True).state_dict()
    for name, value in change.items():
        key = "many.weight.quant_state.bitsandbytes__nf4" if name == "state" else name
        if isinstance(value, tuple):
            value = bytes(state[key].tolist()).replace(*value)
        if isinstance(value, bytes):
            value = torch.tensor(list(value), dtype=torch.uint8)
        if value is None:
            del state[key]
        else:
            state[key] = value
    save(state, tmp_path / "bad.safetensors")
    done = run(arguments(tmp_path / "bad.safetensors", tmp_path / "out"))
    assert done.returncode == 1
    assert part in done.stderr
    assert done.stderr.startswith("load_model: ") and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()


def test_cpp_saves_over_a_sharded_model(tmp_path: Path) -> None:
    """When C++ saves a model over a sharded one, it removes the old index of shards.

    Otherwise a loader that looks for an index first would not read the new model.
    """
    model, folder = quantized(dense(torch.float32), quant_type="nf4"), tmp_path / "model"
    save(dense(torch.float32).state_dict(), tmp_path / "dense.safetensors")
    names = list(model.state_dict())
    shards = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    save({name: torch.zeros(1) for name in names[::2]}, folder / shards[0])
    save({name: torch.zeros(1) for name in names[1::2]}, folder / shards[1])
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: shards[i % 2] for i, name in enumerate(names)}})
    )
    for name in ("config.json", "model-extra.safetensors", "model-00001-of-00002.safetensors.bak"):
        (folder / name).write_text("mine")
    done = run(arguments(tmp_path / "dense.safetensors", folder, quant_type="nf4"))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "model-extra.safetensors", "model-00001-of-00002.safetensors.bak"
    }  # fmt: skip
    stored = stored_tensors(folder)
    with TensorReader(stored) as reader:
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in model.state_dict().items())
