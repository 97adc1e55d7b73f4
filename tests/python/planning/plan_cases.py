"""Plan, apply and check drawn cases of training, each in a new process, and compare predictions with measurements.

    cd tests/python && python -m planning.plan_cases --seed 7

A case has one of three small models, a freedom or choices that are given, and a budget between the least memory and
plenty. Its line has the choices that the plan has switched on, and for each figure the predicted value and the
measured one: bytes that tensors requested, the high-water mark of the process (VmHWM) and the seconds of a batch, the
fastest of five: plans predict from the fastest passes, and other programs of a machine only add to a time. The summary
also has the medians of the five. CPU tensors come from ``shoestring.host_allocator``, as in ``shoestring train``: glibc's allocator holds
more than tensors need.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import shoestring
from planning.situations import Json
from processes import preload
from shoestring.planning import candidates, situation
from shoestring.planning.measure import machine_identity

MIB = 2**20
COUNT = 40
CHECKS = 5  # times that a plan runs
BATCH, TOKENS, WORDS = 8, 96, 1000
PLAIN = candidates.PLAIN | {"micro_batch": str(BATCH)}
Pair = tuple[float, float]  # a predicted value and the measured one


def llama() -> nn.Module:
    from tiny_decoder import build_decoder

    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    model: nn.Module = build_decoder(vocab_size=WORDS, use_cache=False, **sizes)
    return model


def gpt2() -> nn.Module:
    import transformers

    sizes = {"n_positions": TOKENS, "n_embd": 128, "n_layer": 4, "n_head": 4}
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=WORDS, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def sequential() -> nn.Module:
    width = 1024
    blocks = (
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        for _ in range(3)
    )
    return nn.Sequential(nn.Linear(16, width), nn.Sequential(*blocks), nn.Linear(width, 8))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2, "sequential": sequential}


def example_of(model: nn.Module) -> Callable[[int], Tensor]:
    """Return the loss of so many rows of 96 tokens, or of 32 vectors."""
    if isinstance(model, nn.Sequential):
        return lambda rows: model(torch.ones(rows, TOKENS // 3, 16)).square().mean()

    def loss(rows: int) -> Tensor:
        tokens = torch.arange(rows * TOKENS).view(rows, TOKENS) % WORDS
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return loss


@dataclass(frozen=True)
class Case:
    """The training that is planned. ``share`` 0 is the budget with the least memory, and 1 that of the fastest plan."""

    model: str
    freedom: Any
    fixed: dict[str, Any]
    with_disk: bool
    share: float

    def planned(self, model: nn.Module, budget: int | None, folder: str) -> shoestring.TrainingPlan:
        return shoestring.plan_training(
            model,
            example=example_of(model),
            batch_size=BATCH,
            device_memory=budget,
            disk=f"{folder}=1GiB" if self.with_disk else None,
            freedom=self.freedom,
            fixed=self.fixed,
            measure=False,
        )


@dataclass
class Result:
    """A case with what was predicted and measured. ``removed``: by choice, what a plan without it would cost."""

    case: Case
    budget: int
    levers: dict[str, str]
    requested: Pair
    process: Pair
    seconds: Pair
    median_seconds: Pair
    removed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        def pair(name: str, values: Pair, unit: float, places: int) -> str:
            return f"{name} {values[0] / unit:.{places}f} / {values[1] / unit:.{places}f}"

        return "; ".join(
            [
                f"{self.case.model}, {self.case.freedom}, given {self.case.fixed or 'nothing'}",
                f"budget {self.budget / MIB:.0f} MiB",
                ", ".join(f"{name} {value}" for name, value in self.levers.items())
                or "nothing is switched on",
                pair("requested MiB", self.requested, MIB, 1),
                pair("VmHWM MiB", self.process, MIB, 1),
                pair("seconds", self.seconds, 1, 3),
                *(f"without {name}: {text}" for name, text in self.removed.items()),
            ]
        )


def draw_cases(seed: int, count: int) -> list[Case]:
    """Return cases, whose models, freedoms and shares of memory take turns; the rest is drawn."""
    rng = random.Random(seed)
    fixed: list[dict[str, Any]] = [
        {},
        {},
        {"optimizer_state": "fp32"},
        {"micro_batch": 4},
        {"precision": "bf16"},
        {"activations": "recompute"},
        {"step_in_backward": True},
    ]
    models, freedoms, shares = (
        itertools.cycle(values) for values in (MODELS, ("exact", "rounding"), (0.05, 0.2, 0.4, 0.7, 1.2))
    )
    return [
        Case(model, freedom, rng.choice(fixed), rng.random() < 0.5, share * rng.uniform(0.8, 1.2))
        for model, freedom, share in itertools.islice(zip(models, freedoms, shares, strict=False), count)
    ]  # fmt: skip


def memory_of(name: str, freedom: str) -> tuple[int, int]:
    """Return the least memory with which a model has a plan, and the memory of the fastest plan."""
    torch.set_num_threads(1)
    shoestring.host_allocator()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        case = Case(name, freedom, {}, False, 1.0)
        frontier = case.planned(MODELS[name](), None, folder).frontier
    return frontier[0]["peak_bytes"], frontier[-1]["peak_bytes"]


def run_case(case: Case, least: int, most: int) -> Result:
    """Plan a case, apply the plan, and train with it."""
    torch.set_num_threads(1)
    shoestring.host_allocator()
    torch.manual_seed(0)
    model = MODELS[case.model]()
    found: list[Json] = []

    def recorded(*arguments: Any) -> tuple[Json, list[Json]]:
        measured = measure(*arguments)
        found.append(measured[0])
        return measured

    measure = situation.measure_situation
    budget = int(least + case.share * (most - least))
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(situation, "measure_situation", recorded),
    ):
        try:
            plan = case.planned(model, budget, folder)
        except ValueError as error:
            said = re.search(r"device_memory of at least (\d+) bytes", str(error))
            if said is None:
                raise
            # The given choices need more memory than those of the process that measured the least.
            budget = int(said[1]) + 16 * MIB
            plan = case.planned(model, budget, folder)
        applied = plan.apply(model)
        checks = [plan.check(model, example_of(model)) for _ in range(CHECKS)]
        applied.undo()
    levers = switched_on(plan)
    result = Result(
        case,
        budget,
        {name: "disk" if value.startswith("nvme") else value for name, value in levers.items()},
        (checks[0].predicted_bytes, max(check.measured_bytes for check in checks)),
        (plan.peak, max(check.process_bytes for check in checks)),
        (plan.seconds, min(check.measured_seconds for check in checks)),
        (plan.seconds, statistics.median(check.measured_seconds for check in checks)),
    )
    given = {name: str(value).lower() for name, value in case.fixed.items()}
    for lever in levers.keys() - given.keys():
        result.removed[lever] = without(found[-1], case, given, lever, plan.seconds)
    return result


def switched_on(plan: shoestring.TrainingPlan) -> dict[str, str]:
    """Return the choices of a plan that differ from plain training."""
    treatments = {block["treatment"] for block in plan.checkpoints}
    chosen = {
        name: str(plan.to_dict()[name]).lower() for name in candidates.PLAIN if name != "activations"
    } | {
        "activations": treatments.pop() if len(treatments) == 1 else "mixed",
        "micro_batch": str(plan.micro_batch),
    }
    return {name: value for name, value in chosen.items() if value != PLAIN[name]}


def without(found: Json, case: Case, given: dict[str, str], lever: str, seconds: float) -> str:
    """Return what the fastest plan costs whose choice is that of plain training, as predicted."""
    try:
        other = candidates.search(found, case.freedom, given | {lever: PLAIN[lever]})
    except ValueError:
        return "no plan fits"
    slower: float = other["seconds"] / seconds - 1
    return f"{100 * slower:.1f} % slower" if slower > 0 else "as fast"


def run_cases(seed: int, count: int = COUNT) -> Iterator[Result]:
    """Run cases in turn, each in a new process."""
    preload("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2", __name__)
    cases = draw_cases(seed, count)
    memory: dict[tuple[str, str], tuple[int, int]] = {}
    with multiprocessing.get_context("forkserver").Pool(1, maxtasksperchild=1) as pool:
        for case in cases:
            key = (case.model, case.freedom)
            if key not in memory:
                memory[key] = pool.apply(memory_of, key)
            yield pool.apply(run_case, (case, *memory[key]))


def worst(pairs: list[Pair]) -> float:
    """Return the ratio of a predicted value to the measured one that is the furthest from 1."""
    return max((one / other for one, other in pairs), key=lambda ratio: max(ratio, 1 / ratio))


def sets_of_levers(results: list[Result]) -> int:
    """Return how many different sets of choices plans have switched on, whatever the rows of a micro-batch."""
    return len(
        {
            tuple(
                sorted((name, "" if name == "micro_batch" else value) for name, value in one.levers.items())
            )
            for one in results
        }
    )


def summary(results: list[Result]) -> str:
    lines = []
    for name in ("requested", "process", "seconds", "median_seconds"):
        pairs = [getattr(one, name) for one in results]
        median = statistics.median(one / other for one, other in pairs)
        lines.append(f"{name}: predicted / measured: median {median:.3f}, worst {worst(pairs):.3f}")
    exceeded = sum(one.process[1] > one.budget for one in results)
    lines.append(f"budgets exceeded: {exceeded} of {len(results)}")
    lines.append(f"different sets of choices: {sets_of_levers(results)}")
    texts = Counter(
        "slower" if text.endswith("slower") else text for one in results for text in one.removed.values()
    )
    lines.append(
        "plans without one of their choices: " + ", ".join(f"{n} {text}" for text, n in texts.items())
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the predictions of plans with measurements.")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--cases", type=int, default=COUNT)
    options = parser.parse_args()
    print(f"seed {options.seed}, {machine_identity(torch.device('cpu'))['cpu']}, 1 thread")
    results = []
    for result in run_cases(options.seed, options.cases):
        print(result, flush=True)
        results.append(result)
    print(summary(results))


if __name__ == "__main__":
    main()
