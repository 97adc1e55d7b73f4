"""Test that C++, Python and PEFT load each other's saved adapters and compute the same outputs."""

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from build_folder import program
from lora_models import llama, logits, randomise
from shoestring import lora


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(F.silu(self.up_proj(x)))


class Model(nn.Module):
    """The same model as in the C++ program adapter_file."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(20, 32), nn.Linear(32, 7)
        self.mix = nn.Conv1d(32, 32, 3, padding=1)
        self.first, self.second = Block(), Block()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.second(self.first(x)))


IDS = torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(2))
TARGETS = ["up_proj", "down_proj"]


def program_in(tmp_path: Path) -> Callable[..., dict[str, Tensor]]:
    """Return a function that runs commands in the C++ program adapter_file.

    Each of the commands "forward", "base" and "rows" writes an output of the model. The function returns a
    dict from the name of the command to its output.
    """
    save_file(Model().state_dict(), tmp_path / "model.safetensors")
    save_file({"ids": IDS}, tmp_path / "ids.safetensors")

    def call(*commands: str) -> dict[str, Tensor]:
        outputs = {}
        arguments = []
        for command in commands:
            name, _, rest = command.partition("=")
            if name in ("forward", "base", "rows"):
                outputs[name] = tmp_path / f"{name}.safetensors"
                command = f"{name}={outputs[name]}" + ("," + rest if name == "rows" else "")
            arguments.append(command)
        files = [tmp_path / "model.safetensors", tmp_path / "ids.safetensors"]
        done = subprocess.run([*program("adapter_file"), *files, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return {name: load_file(path)["y"] for name, path in outputs.items()}

    return call


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Tensor]]:
    return program_in(tmp_path)


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS)


def train(model: nn.Module, steps: int = 3) -> nn.Module:
    """Train the model with SGD; the C++ program adapter_file takes the same steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS).square().mean().backward()
        optimizer.step()
    return model


def adapted(**options: Any) -> nn.Module:
    model = Model()
    torch.manual_seed(3)
    if "config" in options:
        kind = options.pop("config")
        return lora.apply(model, kind(**{"target_modules": TARGETS} | options))
    return lora.apply(model, **{"rank": 4, "alpha": 6, "target_modules": TARGETS} | options)


def close(received: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    assert (received - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


def assert_files_agree(
    folder: Path, received: Tensor, name: str = "default", tolerance: float = 2e-6
) -> None:
    """Check that PEFT and shoestring load the files that C++ saved, and compute the output ``received``."""
    peft = pytest.importorskip("peft")
    theirs = peft.PeftModel.from_pretrained(Model(), str(folder), adapter_name=name)
    close(output(theirs), received, tolerance)
    close(output(lora.load_adapter(Model(), folder, name)), received, tolerance)


APPLY = "apply=rank:4,alpha:6,targets:up_proj+down_proj"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("", {}),
    "gaussian": (",init:gaussian", {"init": "gaussian"}),
    "rslora": (",rslora:1", {"rslora": True}),
    "dora": (",dora:1", {"dora": True}),
    "lora_bias": (",lora_bias:1", {"lora_bias": True}),
    "pissa": (",init:pissa", {"init": "pissa"}),
    "pissa_niter_4": (",init:pissa_niter_4", {"init": "pissa_niter_4"}),
    "olora": (",init:olora", {"init": "olora"}),
    "ia3": (
        ",method:ia3,feedforward:down_proj",
        {"config": lora.IA3Options, "feedforward_modules": ["down_proj"]},
    ),
    "vera": (",method:vera,rank:8", {"config": lora.VeraOptions, "rank": 8}),
    "saved": (",save:head", {"modules_to_save": ["head"]}),
    "biases": (",bias:all", {"bias": "all"}),
    "adapted_biases": (",bias:lora_only", {"bias": "lora_only"}),
    "embedding": (",targets:embed+up_proj", {"target_modules": ["embed", "up_proj"]}),
    "embedding_dora": (
        ",targets:embed+up_proj,dora:1",
        {"target_modules": ["embed", "up_proj"], "dora": True},
    ),
    "convolution": (
        ",targets:mix+up_proj,init:gaussian",
        {"target_modules": ["mix", "up_proj"], "init": "gaussian"},
    ),
    "convolution_dora": (",targets:mix,dora:1", {"target_modules": ["mix"], "dora": True}),
    "convolution_bias": (",targets:mix,lora_bias:1", {"target_modules": ["mix"], "lora_bias": True}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(6)
def test_a_seed_trains_the_same_and_files_go_both_ways(
    kind: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    text, options = KINDS[kind]
    ours = train(adapted(**options))
    cpp = run("seed=3", APPLY + text, "train=3", "forward", f"save={tmp_path / 'cpp'}", "base")
    # Training changed the output by much more than the tolerance of the comparison with C++.
    assert (output(ours) - output(Model())).abs().max() > 3e-4
    close(cpp["forward"], output(ours), 2e-5)
    # With the option "bias", biases of the base model are trained, so the base output changes.
    if "bias" not in options:
        close(cpp["base"], output(Model()), 2e-5)
    assert_files_agree(tmp_path / "cpp", cpp["forward"], tolerance=2e-5)
    lora.save_adapter(ours, tmp_path / "python")
    close(run(f"load={tmp_path / 'python'}", "forward")["forward"], output(ours), 2e-5)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("init", ["loftq", "pissa"])
def test_initialisations_over_quantised_weights(
    quantize: str, init: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    """LoftQ and PiSSA over quantised weights give the same outputs in Python and C++. The head is dense."""
    ours = adapted(init=init, quantize=quantize, loftq_iterations=3)
    ours.head = Model().head
    text = f"{APPLY},init:{init},iterations:3,quantize:{quantize}"
    # Python and C++ may round a tie between two codes differently.
    close(run("seed=3", text, "forward")["forward"], output(ours), 1e-4)


@pytest.mark.parametrize("rho", [1.0, 2.0])
def test_eva_starts_from_the_same_directions(rho: float, run: Callable[..., Any], tmp_path: Path) -> None:
    class Batches(Model):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return super().forward(ids)

    base = Batches()
    # first.down_proj reads nearly one direction, so the ranks become unequal.
    base.first.up_proj.weight.data += torch.outer(torch.randn(64), 3 * torch.randn(32))
    save_file(base.state_dict(), tmp_path / "model.safetensors")
    ours = lora.apply(base, rank=3, alpha=6, init="eva", target_modules=TARGETS)
    batch = {"ids": IDS, "attention_mask": IDS != 0}
    ranks = lora.initialize_eva(ours, [batch, batch], rho=rho)
    run(APPLY.replace("rank:4", "rank:3"), f"eva={rho}", f"save={tmp_path / 'cpp'}")
    cpp = load_file(tmp_path / "cpp" / "adapter_model.safetensors")
    for name, rank in ranks.items():
        if rank == 0:
            assert not any(name in key for key in cpp)
            continue
        received = cpp[f"base_model.model.{name}.lora_A.weight"]
        torch.testing.assert_close(
            received, ours.get_submodule(name).lora_A["default"].data, rtol=1e-3, atol=1e-5
        )
        assert not cpp[f"base_model.model.{name}.lora_B.weight"].any()
    assert rho == 1.0 or len(set(ranks.values())) > 1
    scalings = {m.adapters["default"].scaling for m in lora_layers(ours)}
    loaded = lora.load_adapter(Model(), tmp_path / "cpp", any_base=True)
    assert {round(m.adapters["default"].scaling, 6) for m in lora_layers(loaded)} == {
        round(s, 6) for s in scalings
    }


def lora_layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "adapters")]


PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": (
        "LoraConfig",
        {"rank_pattern": {"first.up_proj": 2}, "alpha_pattern": {r"second\.down_proj": 3}},
    ),
    "dora": ("LoraConfig", {"use_dora": True}),
    "lora_bias": ("LoraConfig", {"lora_bias": True, "target_modules": ["up_proj"]}),
    "rslora": ("LoraConfig", {"use_rslora": True, "bias": "lora_only"}),
    "saved": ("LoraConfig", {"modules_to_save": ["head"], "bias": "lora_only"}),
    "embedding": ("LoraConfig", {"target_modules": ["embed", "up_proj"]}),
    "convolution": ("LoraConfig", {"target_modules": ["mix", "up_proj"], "rank_pattern": {"mix": 2}}),
    "ia3": ("IA3Config", {"feedforward_modules": ["down_proj"], "modules_to_save": ["head"]}),
    "ia3_pattern": (
        "IA3Config",
        {"target_modules": r".*\.(up|down)_proj", "feedforward_modules": r".*\.down_proj"},
    ),
    "vera": ("VeraConfig", {"r": 8}),
    "vera_without_projection": ("VeraConfig", {"r": 8, "save_projection": False}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PEFT)
@pytest.mark.sample(5)
def test_cpp_loads_what_peft_saves(kind: str, run: Callable[..., Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    name, options = PEFT[kind]
    options = (
        ({"r": 4, "lora_alpha": 6} if name == "LoraConfig" else {}) | {"target_modules": TARGETS} | options
    )
    theirs = peft.get_peft_model(Model(), getattr(peft, name)(**options))
    torch.manual_seed(6)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    theirs.save_pretrained(str(tmp_path / "peft"))
    cpp = run(f"load={tmp_path / 'peft'}", "forward", f"save={tmp_path / 'cpp'}")
    assert (output(theirs) - output(Model())).abs().max() > 1e-2
    close(cpp["forward"], output(theirs))
    assert_files_agree(tmp_path / "cpp", cpp["forward"])


VIRTUAL = {
    "prompt": lora.PromptOptions(tokens=5),
    "prefix": lora.PrefixOptions(tokens=5),
    "projected": lora.PrefixOptions(tokens=5, projection=True, hidden_size=24),
}


@pytest.mark.parametrize("kind", VIRTUAL)
def test_virtual_tokens_start_the_same_and_files_go_both_ways(
    kind: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    model = llama()
    torch.manual_seed(3)
    lora.apply(model, VIRTUAL[kind])
    run("seed=3", f"{kind}={tmp_path / 'cpp'}")
    same_tokens = lora.load_adapter(llama(), tmp_path / "cpp")
    close(logits(same_tokens), logits(model), 1e-5)
    torch.manual_seed(4)
    for parameter in model.virtual_tokens.parameters():
        parameter.data += torch.randn_like(parameter)
    lora.save_adapter(model, tmp_path / "python")
    run(f"{kind}={tmp_path / 'again'},{tmp_path / 'python'}")
    close(logits(lora.load_adapter(llama(), tmp_path / "again")), logits(model), 1e-6)
    peft = pytest.importorskip("peft")
    close(
        logits(peft.PeftModel.from_pretrained(llama(), str(tmp_path / "again")).eval()), logits(model), 1e-5
    )


def test_virtual_tokens_refuse_other_files(run: Callable[..., Any], tmp_path: Path) -> None:
    lora.save_adapter(lora.apply(llama(), VIRTUAL["prefix"]), tmp_path / "prefix")
    lora.save_adapter(lora.apply(llama(), lora.PromptOptions(tokens=4)), tmp_path / "four")
    for folder, message in (
        ("prefix", 'nn::PromptTokens: load: .*peft_type: expected PROMPT_TUNING, received "PREFIX_TUNING"'),
        ("four", "num_virtual_tokens: expected 5, received 4"),
    ):
        with pytest.raises(AssertionError, match=message):
            run(f"prompt={tmp_path / 'out'},{tmp_path / folder}")
    lora.save_adapter(lora.apply(llama(), VIRTUAL["prompt"]), tmp_path / "damaged")
    save_file({"prompt_embeddings": torch.zeros(5, 3)}, tmp_path / "damaged" / "adapter_model.safetensors")
    with pytest.raises(
        AssertionError, match=r"prompt_embeddings: expected shape \[5, 64\].*received \[5, 3\]"
    ):
        run(f"prompt={tmp_path / 'out'},{tmp_path / 'damaged'}")
    for number, (kind, changes, message) in enumerate(
        [
            ("prefix", {"num_layers": 1, "num_attention_heads": 4}, "num_layers: expected 2,.* received 1"),
            ("prompt", {"modules_to_save": ["lm_head"]}, "modules_to_save: expected .* received .*lm_head"),
            ("prompt", {"use_new": True}, ".use_new.: expected null, false or an empty value"),
        ]
    ):  # fmt: skip
        folder = tmp_path / f"changed{number}"
        lora.save_adapter(lora.apply(llama(), VIRTUAL[kind]), folder)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        file = folder / "adapter_model.safetensors"
        save_file(load_file(file), file)  # without the digest of the configuration
        with pytest.raises(ValueError, match=message):
            lora.load_adapter(llama(), folder)
        with pytest.raises(AssertionError, match=message):
            run(f"{kind}={tmp_path / 'out'},{folder}")
    assert not (tmp_path / "out").exists()


class Resized(Model):
    """A model whose embedding and head have new rows, which the base that is loaded does not have."""

    def __init__(self, rows: float = 0.3) -> None:
        super().__init__()
        with torch.no_grad():
            for tensor, count in ((self.embed.weight, 17), (self.head.weight, 5), (self.head.bias, 5)):
                tensor[count:] += rows

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapted_embedding", [False, True])
def test_rows_of_a_resized_vocabulary(adapted_embedding: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    call = program_in(tmp_path)  # C++ loads the values of Model
    targets = [*TARGETS, "embed"] if adapted_embedding else TARGETS
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets)
    theirs = randomise(peft.get_peft_model(Resized(), config))
    theirs.save_pretrained(str(tmp_path / "peft"), save_embedding_layers=True)
    ours = randomise(lora.apply(Resized(), rank=4, target_modules=targets))
    lora.save_adapter(ours, tmp_path / "ours", save_embedding_layers=True)
    for folder, model in ((tmp_path / "peft", theirs), (tmp_path / "ours", ours)):
        close(call(f"load={folder}", "forward")["forward"], output(model))
        close(output(lora.load_adapter(Resized(0), folder)), output(model))
        close(output(peft.PeftModel.from_pretrained(Resized(0), str(folder))), output(model))


def test_several_adapters(run: Callable[..., Any], tmp_path: Path) -> None:
    ours = train(adapted(adapter_name="a"))
    torch.manual_seed(4)
    lora.apply(ours, rank=2, alpha=6, dora=True, target_modules=["up_proj"], adapter_name="b")
    train(ours)
    commands = [
        "seed=3",
        APPLY + ",name:a",
        "train=3",
        "seed=4",
        "apply=rank:2,alpha:6,dora:1,targets:up_proj,name:b",
        "train=3",
    ]
    rows = [None, "a", "b"]
    with lora.adapters_per_row(ours, rows):
        expected = output(ours)
    cpp = run(*commands, "rows=none,a,b", "set=a+b", "forward", f"save={tmp_path / 'cpp'}")
    close(cpp["rows"], expected, 2e-5)
    lora.set_adapter(ours, ["a", "b"])
    close(cpp["forward"], output(ours), 2e-5)
    for name in ("a", "b"):
        lora.set_adapter(ours, name)
        assert_files_agree(tmp_path / "cpp" / name, output(ours), name, 2e-5)
        close(run(*commands, f"merge={name}", "forward")["forward"], output(ours), 2e-5)
    lora.set_adapter(ours, "b")
    close(run(*commands, "delete=a", "set=b", "forward")["forward"], output(ours), 2e-5)
    close(run(*commands, "merge=a", "unmerge=1", "set=b", "forward")["forward"], output(ours), 2e-5)


@pytest.mark.parametrize("method", ["PREFIX_TUNING", "PROMPT_TUNING", "OFT"])
def test_refuses_other_methods_by_name(method: str, run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(f'{{"peft_type": "{method}"}}')
    with pytest.raises(AssertionError, match=f'peft_type: expected LORA.*received "{method}"'):
        run(f"load={tmp_path}")


def test_heads_that_the_module_lacks(run: Callable[..., Any], tmp_path: Path) -> None:
    """PEFT lists every head that a task may have in modules_to_save. C++ skips those that it does not find."""
    model = train(adapted(modules_to_save=["head"]))
    lora.save_adapter(model, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text()) | {"modules_to_save": ["head", "classifier", "score"]}
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(weights), weights)  # without the digest of the configuration
    path.write_text(json.dumps(config | {"task_type": "SEQ_CLS"}))
    close(run(f"load={tmp_path / 'adapter'}", "forward")["forward"], output(model))
    path.write_text(json.dumps(config))
    with pytest.raises(
        AssertionError, match="modules_to_save: expected names of modules, received 'classifier'"
    ):
        run(f"load={tmp_path / 'adapter'}")


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_cpp_changes_the_base_again_as_peft_does(init: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    call = program_in(tmp_path)
    base = Model()
    base.load_state_dict(load_file(tmp_path / "model.safetensors"))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=init)
    trained = peft.get_peft_model(copy.deepcopy(base), config)
    torch.manual_seed(5)
    for name, parameter in trained.named_parameters():
        if "lora_" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    trained.save_pretrained(str(tmp_path / "peft"))
    expected = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "peft"))(IDS)
    found = call(f"load={tmp_path / 'peft'}", "forward", f"save={tmp_path / 'ours'}")["forward"]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        call(f"load={tmp_path / 'ours'}", "forward")["forward"], found, rtol=1e-4, atol=1e-4
    )


def test_cpp_refuses_another_base(tmp_path: Path) -> None:
    call = program_in(tmp_path)
    base = Model()
    with torch.no_grad():
        base.head.weight *= 1.05
    lora.save_adapter(lora.apply(base, rank=2, target_modules=TARGETS), tmp_path / "adapter")
    with pytest.raises(AssertionError, match=r"expected the base model of the adapter .* other values"):
        call(f"load={tmp_path / 'adapter'}", "forward")
