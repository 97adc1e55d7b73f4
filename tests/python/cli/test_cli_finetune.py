"""Test `shoestring finetune` and `generate`: data formats, PEFT as reference, adapters and merged weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli_helpers import (
    TINY,
    TUNE,
    assert_same_weights,
    losses,
    refuse,
    run,
    succeed,
    text,
    weights,
    write_jsonl,
)
from shoestring.training.run import digests, loop

pytestmark = pytest.mark.usefixtures("blank_images")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text(text())
    steps = ["--steps", "20", "--lr", "1e-2", "--baseline"]
    succeed("train", "--data", folder / "text.txt", "--out", folder / "run", *TINY, *steps)
    return folder / "run" / "model"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(text(60).upper())
    pairs = [(f"the cat {i}", f" sat on {i}") for i in range(40)]
    chats = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in pairs
    ]
    return {
        "text": folder / "text.txt",
        "completion": write_jsonl(
            folder / "completion.jsonl", [{"prompt": a, "completion": b} for a, b in pairs]
        ),
        "chat": write_jsonl(folder / "chat.jsonl", chats),
    }


def command(model: Path, data: Path, out: Path, *more: object) -> list[object]:
    steps = ["--steps", "8", "--eval-every", "4", "--checkpoint-every", "4", "--lr", "1e-2"]
    tune = TUNE[:-2] if "--full" in more else TUNE  # adapters alone have a rank
    return ["finetune", "--model", model, "--data", data, "--out", out, *tune, *steps, *more]


@pytest.mark.parametrize("kind", ["text", "completion", "chat"])
@pytest.mark.parametrize("quantize", ["none", "nf4"])
@pytest.mark.sample(3)
def test_twins_learn_the_same(
    model: Path, data: dict[str, Path], tmp_path: Path, kind: str, quantize: str
) -> None:
    # Only the data kind "text" tests 8-bit optimizer state. The other kinds have few tokens per step and a
    # high learning rate, so the rounding of the state would show.
    state = "8bit" if kind == "text" else "fp32"
    succeed(
        *command(model, data[kind], tmp_path / "ours", "--quantize", quantize, "--optimizer-state", state)
    )
    succeed(*command(model, data[kind], tmp_path / "plain", "--quantize", quantize, "--baseline"))
    ours, plain = losses(tmp_path / "ours"), losses(tmp_path / "plain")
    assert ours[0][0] == pytest.approx(plain[0][0], rel=1e-4) and ours[0][1] == pytest.approx(
        plain[0][1], rel=1e-2
    )
    assert ours[-1][0] < 0.95 * ours[0][0]
    for a, b in zip(ours, plain, strict=True):
        assert a[0] == pytest.approx(b[0], rel=0.01 if state == "8bit" else 1e-3)
    for run_folder in (tmp_path / "ours", tmp_path / "plain"):
        for part in json.loads((run_folder / "summary.json").read_text())["memory"]:
            if part["name"] in ("weights", "gradients", "optimizer"):
                assert part["measured"] == pytest.approx(part["expected"], rel=0.01), part
    first, second = weights(tmp_path / "ours" / "adapter"), weights(tmp_path / "plain" / "adapter")
    assert {name: tensor.shape for name, tensor in first.items()} == {
        name: tensor.shape for name, tensor in second.items()
    }


@pytest.mark.parametrize(("kind", "close"), [("int8", 0.02), ("int4", 0.1)])
def test_integers_learn_as_full_weights_do(
    model: Path,
    data: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    close: float,
) -> None:
    for quantize in (kind, "none"):
        options = ["--quantize", quantize, "--optimizer-state", "fp32"]
        succeed(*command(model, data["completion"], tmp_path / quantize, *options))
    # Each training step amplifies differences from earlier steps, so single late losses may be far apart. The
    # test compares the sum of all losses, and the first loss, which no step has changed yet.
    ours, dense = ([row[0] for row in losses(tmp_path / name)] for name in (kind, "none"))
    assert ours[0] == pytest.approx(dense[0], rel=close)
    assert sum(ours) == pytest.approx(sum(dense), rel=close)
    for part in json.loads((tmp_path / kind / "summary.json").read_text())["memory"]:
        if part["name"] == "weights":
            assert part["measured"] == pytest.approx(part["expected"], rel=0.001)
    line = refuse(capsys, *command(model, data["text"], tmp_path / "plain", "--quantize", kind, "--baseline"))
    assert "quantize" in line and "nf4 | none with --baseline" in line


def test_quantised_weights_are_codes_from_the_beginning(
    model: Path,
    data: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import LlamaForCausalLM

    import shoestring

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the whole model is loaded")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", refused)
    succeed(*command(model, data["text"], tmp_path / "run"))
    # A checkpoint that is already quantised holds the codes that quantisation on loading gives, so training
    # gives the same losses.
    saved = shoestring.load_quantized(model, quant_type="nf4", dtype=torch.float32)
    shoestring.save_quantized(saved, tmp_path / "model")
    for file in model.glob("*token*"):
        shutil.copy(file, tmp_path / "model")
    for quantize in ("nf4", "none"):
        succeed(*command(tmp_path / "model", data["text"], tmp_path / quantize, "--quantize", quantize))
        assert losses(tmp_path / quantize) == losses(tmp_path / "run")
    for option in ("--full", "--baseline", "--merge"):
        line = refuse(capsys, *command(tmp_path / "model", data["text"], tmp_path / "no", option))
        assert "quantised already: expected no --full, --baseline or --merge" in line
    line = refuse(capsys, *command(tmp_path / "model", data["text"], tmp_path / "no", "--quantize", "int8"))
    assert "its weights are nf4 or fp4 already" in line


def test_gpt2_stays_dense_by_default(
    model: Path, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=300, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    for file in model.glob("*token*"):
        shutil.copy(file, tmp_path / "gpt2")
    dense = "frozen weights stay dense: the model's layers are Conv1D"
    for kind in ([], ["--baseline"]):
        capsys.readouterr()
        out = tmp_path / f"run{len(kind)}"
        succeed(*command(tmp_path / "gpt2", data["text"], out, "--steps", "4", *kind))
        assert dense in "".join(capsys.readouterr())
    ours, plain = (losses(tmp_path / name) for name in ("run0", "run1"))
    assert [row[0] for row in ours] == pytest.approx([row[0] for row in plain], rel=0.01)
    for kind in ([], ["--baseline"]):
        options = [tmp_path / f"no{len(kind)}", "--quantize", "nf4", *kind]
        line = refuse(capsys, *command(tmp_path / "gpt2", data["text"], *options))
        assert "transformer.h.0.attn.c_attn" in line and "Conv1D" in line
    succeed("estimate", "--model", tmp_path / "gpt2", "--seq-len", "32")
    assert dense in capsys.readouterr().out
    line = refuse(capsys, "estimate", "--model", tmp_path / "gpt2", "--seq-len", "32", "--quantize", "nf4")
    assert "expected None for a model with Conv1D layers" in line


def test_full_finetuning_changes_every_weight(model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    succeed(*command(model, data["text"], tmp_path / "ours", "--full"))
    succeed(*command(model, data["text"], tmp_path / "plain", "--full", "--baseline"))
    for a, b in zip(losses(tmp_path / "ours"), losses(tmp_path / "plain"), strict=True):
        assert a[0] == pytest.approx(b[0], rel=0.01)
    before, after = weights(model), weights(tmp_path / "ours" / "model")
    assert before.keys() == after.keys() and not any(
        torch.equal(before[name], after[name]) for name in before
    )


@pytest.mark.parametrize("plain", [[], ["--baseline"]], ids=["ours", "plain"])
def test_merged_model_says_what_the_adapter_says(
    model: Path, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], plain: list[str]
) -> None:
    succeed(*command(model, data["completion"], tmp_path / "run", "--quantize", "none", "--merge", *plain))
    options = ["--temperature", "0", "--max-new-tokens", "12", "the cat 3"]
    capsys.readouterr()
    succeed("generate", "--model", tmp_path / "run" / "model", *options)
    merged = capsys.readouterr().out
    succeed("generate", "--model", model, "--adapter", tmp_path / "run" / "adapter", *options)
    adapted = capsys.readouterr().out
    succeed("generate", "--model", model, *options)
    assert merged == adapted != capsys.readouterr().out


def test_peft_reads_our_adapter(model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    succeed(*command(model, data["text"], tmp_path / "run", "--quantize", "none", "--eval-batches", "100"))
    peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model), tmp_path / "run" / "adapter"
    )
    from shoestring.data.batches import split_blocks
    from shoestring.data.token_file import read_token_file
    from shoestring.training.run.models import plain_loss

    _, val = split_blocks(read_token_file(tmp_path / "run" / "tokens.bin")[0], 32, 0.02)
    inputs, labels = val.rows(list(range(len(val))))
    peft.eval()
    with torch.no_grad():
        loss = plain_loss(peft)(inputs, labels).item() / labels.numel()
    assert loss == pytest.approx(losses(tmp_path / "run")[-1][2], rel=1e-5)


def test_target_modules_are_honoured(model: Path, data: dict[str, Path], tmp_path: Path) -> None:
    for number, (targets, plain) in enumerate(
        (targets, plain) for targets in ("q_proj", "q_proj, v_proj") for plain in ([], ["--baseline"])
    ):
        out = tmp_path / f"run{number}"
        succeed(*command(model, data["text"], out, "--target-modules", targets, "--steps", 1, *plain))
        names = {name.split(".lora_")[0].rpartition(".")[2] for name in weights(out / "adapter")}
        assert names == set(targets.split(", "))


def test_targets_that_match_nothing(
    model: Path, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for plain in ([], ["--baseline"]):
        for targets in ("nothing", "q_proj, v_porj"):
            given = command(model, data["text"], tmp_path / "run", "--target-modules", targets, *plain)
            line = refuse(capsys, *given)
            assert (
                f"'{targets.split()[-1]}', which matches nothing" in line and not (tmp_path / "run").exists()
            )
        assert "the nearest are v_proj" in line
    assert "--target-modules: expected all-linear, or names" in refuse(
        capsys, *command(model, data["text"], tmp_path / "run", "--target-modules", " , ")
    )


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_stopped_run_continues_bit_for_bit(
    model: Path, data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    succeed(*command(model, data[kind], tmp_path / "straight"))
    with monkeypatch.context() as patch:

        def stopped(*_: object) -> None:
            raise ZeroDivisionError

        add = loop.MetricsLog.add
        patch.setattr(
            loop.MetricsLog, "add", lambda log, row: stopped() if row["step"] == 6 else add(log, row)
        )
        # The command does not catch this ZeroDivisionError, so the run ends as in a crash.
        with pytest.raises(ZeroDivisionError):
            run(*command(model, data[kind], tmp_path / "run"))
    succeed(*command(model, data[kind], tmp_path / "run", "--resume"))
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert_same_weights(tmp_path / "run" / "adapter", tmp_path / "straight" / "adapter")


def test_the_beginning_says_what_is_trained(
    model: Path, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines before the first step: what patch has replaced and left, the chat format, the rows."""
    succeed(*command(model, data["chat"], tmp_path / "run", "--steps", 1))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("patched: loss without logits, from lm_head; ")
    assert lines[1] == "left to PyTorch: no part of a block"
    assert lines[2].startswith("chat format: shoestring's: ") and "rows of chat" in lines[3]
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    template = "{% for m in messages %}{{ m['role'] + m['content'] + eos_token }}{% endfor %}"
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    succeed(*command(copy, data["chat"], tmp_path / "own", "--steps", 1))
    assert "chat format: the template of the tokenizer" in capsys.readouterr().out.splitlines()


def test_a_chat_answers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    succeed("generate", "--model", model, "--chat", "--max-new-tokens", "5", "the cat", "--seed", "1")
    first = capsys.readouterr().out
    succeed("generate", "--model", model, "--chat", "--max-new-tokens", "5", "the cat", "--seed", "1")
    assert capsys.readouterr().out == first


def test_an_answer_ends_where_the_template_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base model learns a template whose end of an answer is not its end-of-text token."""
    template = (
        "{% for m in messages %}{{ m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
    )
    (tmp_path / "text.txt").write_text(text())
    succeed("train", "--data", tmp_path / "text.txt", "--out", tmp_path / "base", *TINY, "--steps", 1)
    base = tmp_path / "base" / "model"
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<|im_end|>"])  # some models have it as no special token
    tokenizer.chat_template = template
    tokenizer.save_pretrained(base)
    grown = AutoModelForCausalLM.from_pretrained(base)
    grown.resize_token_embeddings(len(tokenizer))
    grown.save_pretrained(base)
    own, end = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert grown.generation_config.eos_token_id == own
    chat = {"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat sat"}]}
    data = write_jsonl(tmp_path / "chat.jsonl", [chat] * 40)
    capsys.readouterr()
    for how, steps in (("--merge", 1), ("--full", 40)):
        succeed(*command(base, data, tmp_path / how, "--steps", steps, "--quantize", "none", how))
        assert "stops after" not in capsys.readouterr().out  # no end-of-text token was added
        saved = json.loads((tmp_path / how / "model" / "generation_config.json").read_text())
        assert saved["eos_token_id"] == [own, end]
    for file in (None, {"eos_token_id": own}):  # of a folder that another program has written
        if file is not None:
            (tmp_path / how / "model" / "generation_config.json").write_text(json.dumps(file))
        given = ["--model", tmp_path / how / "model", "--max-new-tokens", 20, "--temperature", 0]
        succeed("generate", *given, "--chat", "the")
        assert capsys.readouterr().out == "cat sat\n"


def test_resume_with_another_model_names_it(
    model: Path, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    succeed(*command(copy, data["text"], tmp_path / "run", "--steps", 1, "--baseline"))
    again = command(copy, data["text"], tmp_path / "run", "--steps", 1, "--baseline", "--resume")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ messages }}"}))
    line = refuse(capsys, *again)
    assert "model_files differs: 'tokenizer_config.json' has other contents" in line
    shutil.copy(model / "tokenizer_config.json", copy)
    changed = weights(copy)
    changed["model.norm.weight"] += 1
    save_file(changed, copy / "model.safetensors", metadata={"format": "pt"})
    assert "model_files differs: 'model.safetensors' has other contents" in refuse(capsys, *again)


def test_a_digest_is_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PART", 100)
    monkeypatch.setattr(digests, "BLOCK", 7)
    path = tmp_path / "a.bin"
    found = set()
    for place in [None, 0, 99, 100, 150, 299, 300]:
        content = bytearray(301)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        [[name, size, digest]] = digests.file_list([path])
        assert (name, size) == ("a.bin", 301)
        found.add(digest)
    assert len(found) == 7
    # the same as the digests of the parts, one after the other
    parts = b"".join(hashlib.sha256(content[begin : begin + 100]).digest() for begin in range(0, 301, 100))
    assert digest == hashlib.sha256(parts).hexdigest()[:32]


def test_a_digest_of_large_weights_is_of_their_begin_and_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PART": 100, "BLOCK": 7, "LARGE": 300, "STRIDE": 50}.items():
        monkeypatch.setattr(digests, name, value)
    path = tmp_path / "a.safetensors"

    def digest(place: int | None) -> str:
        content = bytearray(301)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        return str(digests.file_list([path])[0][2])

    read = [0, 57, 99, 100, 106, 256, 300]
    assert len({digest(place) for place in [None, *read]}) == len(read) + 1
    assert digest(107) == digest(257) == digest(None)


def test_filled_batches(
    model: Path, data: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --pack fill, batches hold more tokens than with --pack batch. A run resumes in the middle of an epoch."""
    for pack in ("batch", "fill"):
        succeed(*command(model, data["completion"], tmp_path / pack, "--pack", pack))
    counts = {
        pack: [json.loads(line)["tokens"] for line in (tmp_path / pack / "metrics.jsonl").open()]
        for pack in ("batch", "fill")
    }
    assert sum(counts["fill"]) > sum(counts["batch"])
    for name in sorted((tmp_path / "fill" / "checkpoints").iterdir())[1:]:
        shutil.rmtree(name)  # the run continues from an older checkpoint
    before = losses(tmp_path / "fill")
    succeed(*command(model, data["completion"], tmp_path / "fill", "--pack", "fill", "--resume"))
    assert losses(tmp_path / "fill") == before
    for more, message in (
        (["--baseline"], "--pack fill: expected no --baseline"),
        ([], "--pack fill: expected prompts with completions, or messages, got text"),
    ):
        out = tmp_path / "refused"
        assert message in refuse(capsys, *command(model, data["text"], out, "--pack", "fill", *more))
        assert not out.exists()
