"""Choose how several processes share a training, from the measured passes of one process and a link."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shoestring.checkpoint.costs import OFFLOADED
from shoestring.checkpoint.weights import OWNER
from shoestring.core.errors import InputError
from shoestring.distributed.links import Link
from shoestring.distributed.parallelize import STRATEGIES, check_rows
from shoestring.distributed.rank_layout import (
    RankPart,
    rank_parts,
    shard_bytes,
    shard_elements,
    trained_of,
    units,
)
from shoestring.distributed.rank_program import Setting, replicated, sharded, split
from shoestring.distributed.step_program import Compute, Hold, Program, sent_bytes
from shoestring.optim.base import LowMemoryOptimizer
from shoestring.optim.state_sizes import State, optimizer_state, total
from shoestring.planning import candidates

Json = dict[str, Any]

PLANNED = STRATEGIES[:4]  # the strategies for which plans are made, from the one that splits the least
# Formulas of what is sent have an error of about a tenth. Of strategies within it, the one that splits the least is taken.
MARGIN = 1.1


def check_processes(model: nn.Module, batch_size: int, processes: int, link: str | None) -> Link | None:
    """Return the link of several processes, or None for one process.

    Raises:
        ValueError: the processes cannot divide the batch or the weights, or the link is none.
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise InputError(
            f"plan_training: processes: expected a number of processes of at least 1, received {processes!r}"
        )
    if processes == 1:
        if link is not None:
            raise InputError(f"plan_training: link: expected None for one process, received {link!r}")
        return None
    if batch_size % processes:
        raise InputError(
            f"plan_training: batch_size: expected a multiple of the {processes} processes, received {batch_size}"
        )
    if hasattr(model, OWNER):
        raise InputError("plan_training: processes: expected 1 for a model whose weights leave the device")
    if link is None:
        raise InputError(
            "plan_training: link: expected bandwidth and latency, such as '10Gbit,50us', for several processes, received "
            "None; str(shoestring.distributed.measure_link()) has them"
        )
    try:
        return Link.parse(link)
    except ValueError as error:
        raise InputError(f"plan_training: link: {error}") from None


@dataclass(frozen=True)
class Sharing:
    """How one strategy divides a model among processes.

    Attributes:
        strategy: the name of the strategy.
        model: the model.
        make: makes an optimizer of parameters, with ``state_format``.
        processes: the number of processes.
        link: what connects them.
        gloo: whether they are CPU processes that Gloo connects.
    """

    strategy: str
    model: nn.Module
    make: Callable[..., LowMemoryOptimizer]
    processes: int
    link: Link
    gloo: bool

    def _parts(self, state: State) -> tuple[list[RankPart], int]:
        """Return what each rank steps with "zero1" and "zero2", and the rank that has the most."""
        parts = rank_parts(state.arenas, self.processes, self.gloo)
        held = [part.gradients + sum(part.state.bytes().values()) for part in parts]
        return parts, held.index(max(held))

    def _state(self, state_format: str) -> State:
        """Return the state of all parameters; with "zero3", that of the rows of a rank."""

        def numel(p: Tensor) -> int:
            return shard_elements(p, self.processes) if self.strategy == "zero3" else p.numel()

        return optimizer_state(
            self.make(trained_of(self.model.parameters()), state_format=state_format), numel
        )

    def program(self, state_format: str, micro: int, recomputes: bool = False) -> Program:
        """Return what a rank computes, sends and holds in a step of so many micro-batches."""
        setting = Setting(self.processes, micro=micro, forward=1 / 4 if recomputes else 1 / 3, gloo=self.gloo)
        if self.strategy == "ddp":
            return replicated(self.model, setting)
        if self.strategy == "zero3":
            return sharded(self.model, setting)
        parts, rank = self._parts(self._state(state_format))
        params = trained_of(self.model.parameters())
        return split(self.strategy, self.model, setting, params, parts, rank)

    def situation(self, found: Json, micro: int) -> Json:
        """Return the situation of a rank. Its gradients are there from the start, except with "zero3".

        Args:
            found: the situation of one process.
            micro: 1 for one micro-batch, or 2 for several, whose sums some strategies hold.
        """
        ways = {way["state"] for form in found["forms"] for way in form["optimizers"]}
        rank = {state: self._rank(state, micro) for state in ways}
        weights = self._weights()
        forms = []
        for form in found["forms"]:
            forms.append(
                form
                | {
                    "gradient_bytes": self._growing(),
                    "passes": [self._pass(one) for one in form["passes"]],
                    "places": [place | {"device_bytes": weights} for place in form["places"]],
                    "optimizers": [
                        way | rank[way["state"]](way)
                        for way in form["optimizers"]
                        if not way["step_in_backward"]
                    ],
                }
            )
        return found | {"forms": forms}

    def _growing(self) -> int:
        """Return the bytes of gradients that a rank gets block by block: with "zero3", those of its rows."""
        if self.strategy != "zero3":
            return 0
        return sum(unit.gradients for unit in units(self.model, self.processes)) // self.processes

    def _pass(self, measured: Json) -> Json:
        """Return a pass of a rank. Gradients that its backward leaves are whole until they are sent."""
        if self.strategy != "zero3":
            return measured | {"kept": measured["freed"]}
        # Offloaded activations are told apart from weights by the storages of the whole weights, which a rank frees.
        freed = [
            block | {"choices": [choice for choice in block["choices"] if choice["name"] not in OFFLOADED]}
            for block in measured["freed"]
        ]
        kept = [
            block | {"gradient_bytes": own["gradient_bytes"] // self.processes}
            for block, own in zip(freed, measured["kept"], strict=True)
        ]
        return measured | {"freed": freed, "kept": kept}

    def _weights(self) -> int:
        params, buffers = list(self.model.parameters()), sum(b.nbytes for b in self.model.buffers())
        ranks = self.processes if self.strategy == "zero3" else 1
        return buffers + sum(shard_bytes(p, ranks) for p in params)

    def _rank(self, state_format: str, micro: int) -> Callable[[Json], Json]:
        """Return a function from the optimizer's way in one process to what is different in a rank."""
        state = self._state(state_format)
        trained = trained_of(self.model.parameters())
        gradients = sum(p.nbytes for p in trained)
        whole = max(1, sum(p.numel() for p in trained))
        share = 1.0
        if self.strategy == "zero3":
            gradients = self._growing()
            share = sum(shard_elements(p, self.processes) for p in trained) / whole
        elif self.strategy != "ddp":
            parts, rank = self._parts(state)
            state = parts[rank].state
            share = sum(piece.end - piece.begin for piece in parts[rank].ranges) / whole
            gradients = parts[rank].gradients if self.strategy == "zero2" else gradients
        held, later = _peaks(self.program(state_format, micro))
        held = max(gradients, held) - self._growing()
        arenas = sum(total(*(arena.bytes() for arena in state.arenas)).values())
        rest = sum(state.rest.values())

        def changed(way: Json) -> Json:
            away = way["offload"] != "none"
            return {
                "device_bytes": held + rest + (0 if away else arenas),
                "step_bytes": max(0, later - held),
                "host_bytes": min(arenas, way["host_bytes"]) if away else 0,
                "disk_bytes": arenas if away else 0,
                "seconds": way["seconds"] * share,
            }

        return changed

    def plan(self, found: Json, freedom: str, given: Mapping[str, str]) -> Json:
        """Return the fastest plan of a rank, whose time is that of a step with what is sent.

        Raises:
            NoPlanError: no plan fits.
        """
        plans = list(self._plans(found, freedom, given))
        if not plans:
            # This raises, and says the least budgets.
            return candidates.search(self.situation(found, 2), freedom, given)
        return min(plans, key=lambda one: float(one["seconds"]))

    def _plans(self, found: Json, freedom: str, given: Mapping[str, str]) -> Iterator[Json]:
        rows = str(found["batch_size"])
        for micro in (1, 2):
            fixed = {"micro_batch": rows, **given} if micro == 1 else given
            try:
                one = candidates.search(self.situation(found, micro), freedom, fixed)
            except candidates.NoPlanError:
                continue
            if (one["accumulate"] == 1) == (micro == 1):
                yield self._sent(one)

    def _of_plan(self, content: Json) -> Program:
        """Return what a rank computes, sends and holds in a step of a plan."""
        recomputes = any(block["treatment"] != "keep" for block in content["checkpoints"])
        return self.program(content["optimizer_state"], content["accumulate"], recomputes)

    def traffic(self, content: Json) -> dict[str, float]:
        """Return the bytes that a rank sends in a step of a plan, on average over the ranks, by what is sent."""
        return sent_bytes(self._of_plan(content).collectives, self.gloo)

    def _sent(self, content: Json) -> Json:
        """Return a plan with the time in which ranks wait for each other."""
        seconds = self._of_plan(content).seconds(content["seconds"], self.link, gloo=self.gloo)
        waits = seconds - content["seconds"]
        points = {
            name: [one | {"seconds": one["seconds"] + waits} for one in content[name]]
            for name in ("frontier", "alternatives")
        }
        return content | points | {"seconds": seconds, "least_seconds": seconds}


def check_strategy(asked: str | None, known: Sequence[str]) -> None:
    """Raise InputError if the given strategy is not one of those that are known, which None is."""
    if asked is not None and asked not in known:
        raise InputError(
            f"plan_training: fixed: parallel: expected {' | '.join(known)}, received {asked[:40]}"
        )


def _why_not_split(model: nn.Module, processes: int, activations: str | None = None) -> str | None:
    """Return why processes cannot split the weights of a model, with this given treatment of all blocks, or None."""
    if activations in OFFLOADED:
        return f"expected activations that stay on the device, received {activations}"
    for name, p in model.named_parameters():
        if p.ndim == 0:
            return f"expected parameters with rows, received {name} without a dimension"
    try:
        check_rows(model, processes)
    except ValueError as error:
        return str(error).removeprefix("parallelize: model: ").partition(". Quantise")[0]
    return None


def _peaks(program: Program) -> tuple[int, int]:
    """Return the most bytes that a program holds until it has computed, and afterwards."""
    last = max(i for i, each in enumerate(program.operations) if isinstance(each, Compute))
    held, until, later = 0, 0, 0
    for i, each in enumerate(program.operations):
        held += each.bytes if isinstance(each, Hold) else 0
        until, later = (max(until, held), later) if i <= last else (until, max(later, held))
    return until, later


def plan_ranks(
    model: nn.Module,
    found: Json,
    freedom: str,
    given: Mapping[str, str],
    make: Callable[..., LowMemoryOptimizer],
    processes: int,
    link: Link,
) -> Json:
    """Return the fastest plan of a rank, with the strategy of ``parallelize`` and its reason.

    Args:
        model: the model.
        found: the situation of one process that has the rows of a rank.
        freedom: what the plan may change.
        given: choices that are given, of which ``parallel`` is the only strategy that is planned for.
        make: makes an optimizer of parameters.
        processes: the number of processes.
        link: what connects them.

    Raises:
        NoPlanError: no plan fits with any strategy.
        ValueError: the given strategy cannot train the model.
    """
    if given.get("step_in_backward") == "true":
        raise InputError(
            "plan_training: fixed: step_in_backward: expected false for several processes, received true"
        )
    asked = given.get("parallel")
    others = {name: value for name, value in given.items() if name != "parallel"}
    hindrance = _why_not_split(model, processes, given.get("activations"))
    if asked == "zero3" and hindrance is not None:
        raise InputError(
            f"plan_training: fixed: parallel: expected {' | '.join(PLANNED[:3])} for this model, received zero3: {hindrance}"
        )
    sharings = {
        name: Sharing(name, model, make, processes, link, found["host_is_device"])
        for name in (PLANNED if asked is None else (asked,))
        if name != "zero3" or hindrance is None
    }
    plans: dict[str, Json] = {}
    errors: dict[str, candidates.NoPlanError] = {}
    for strategy, sharing in sharings.items():
        try:
            plans[strategy] = sharing.plan(found, freedom, others)
        except candidates.NoPlanError as error:
            errors[strategy] = error
    if not plans:
        raise errors[next(reversed(errors))]
    fastest = min(plan["seconds"] for plan in plans.values())
    chosen = next(name for name, plan in plans.items() if plan["seconds"] <= MARGIN * fastest)
    sent = sharings[chosen].traffic(plans[chosen])
    text = " and ".join(f"{size / 2**20:.3g} MiB of {what}" for what, size in sent.items())
    took = f"a batch takes {plans[chosen]['seconds']:.3g} s over {link}, in which a rank sends {text or 'nothing'}"
    texts = [f"as given: {took}" if asked else took]
    texts += [f"{name} {plan['seconds']:.3g} s" for name, plan in plans.items() if name != chosen]
    for name, failure in errors.items():
        least = re.search(r"at least \d+ bytes \(([^)]*)\)", str(failure))
        texts.append(f"{name} does not fit" + (f", since it needs {least[1]}" if least else ""))
    if asked is None and hindrance is not None:
        texts.append(f"zero3 is left out: {hindrance}")
    reason = {"lever": "parallel", "text": f"--parallel {chosen}: {'; '.join(texts)}"}
    return plans[chosen] | {"parallel": chosen, "reasons": [reason, *plans[chosen]["reasons"]]}
