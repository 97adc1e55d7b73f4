"""Estimate the memory, the traffic and the time of a training step in several processes, without starting any."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from shoestring.core.errors import InputError
from shoestring.distributed import rank_program
from shoestring.distributed.compress import BITS
from shoestring.distributed.links import Collective, Link
from shoestring.distributed.parallelize import STRATEGIES
from shoestring.distributed.rank_layout import (
    RankPart,
    ddp_buckets,
    rank_parts,
    shard_bytes,
    shard_elements,
    shard_tensors,
    trained_of,
    units,
)
from shoestring.distributed.rank_program import Setting
from shoestring.distributed.step_program import Program, sent_bytes
from shoestring.optim import state_sizes
from shoestring.training import memory
from shoestring.training.conflicts import check_shares, parallel_conflicts
from shoestring.training.estimate import formulas
from shoestring.training.estimate.config import EstimateConfig
from shoestring.training.estimate.step import Estimate, add_activations, add_state, optimizers_of
from shoestring.training.optimizers import trained
from shoestring.training.options import refuse_together

SENT = "sent: "
MESH = "REPLICASxSHARDS, such as 2x4"


@dataclass
class RankEstimate:
    """The rank that has the most, in a training step of several processes.

    Attributes:
        strategy: "ddp", "zero1", "zero2", "zero3", "hsdp", "diloco" or "localsgd".
        estimate: the memory of the rank; its traffic has the bytes that a rank sends in a step, on average.
        collectives: the collectives of a step; of "diloco" and "localsgd", those of an average.
        seconds: the seconds of a step; None without a link and the seconds that a rank computes.
        link_seconds: the seconds of a step in which nothing is computed; None without a link.
    """

    strategy: str
    estimate: Estimate
    collectives: list[Collective]
    seconds: float | None = None
    link_seconds: float | None = None

    @property
    def bytes(self) -> int:
        """Bytes of memory of the rank's device, as far as they are known."""
        return self.estimate.totals()["device"]

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step, on average over the ranks and steps."""
        return sum(size for what, size in self.estimate.traffic.items() if what.startswith(SENT))


@dataclass(frozen=True)
class Choice:
    """The strategies that were compared, and the one that was chosen.

    Attributes:
        chosen: the chosen one.
        compared: all of them that can train the model with these options.
        reasons: why, in sentences.
    """

    chosen: RankEstimate
    compared: list[RankEstimate]
    reasons: list[str]


def check_ranks(config: EstimateConfig) -> None:
    """Raise InputError for the first option of several processes that does not fit the others."""
    memory.parse_budget(config.memory, "memory")
    if config.world is None:
        given = {
            "link": config.link, "inner-link": config.inner_link, "mesh": config.mesh,
            "step-seconds": config.step_seconds, "every": config.every,
            "parallel": None if config.parallel == "auto" else config.parallel,
            "compress": None if config.compress == "none" else config.compress,
        }  # fmt: skip
        for name, value in given.items():
            if value is not None:
                raise InputError(f"--{name} {value}: expected --world as well, received none")
        return
    name = f"--parallel {config.parallel}"
    averages = config.parallel in ("diloco", "localsgd")
    if not averages:
        check_shares(config.accumulate, config.world)
    world, is_flat = f"--world {config.world}", config.parallel not in ("auto", "hsdp")
    refused = {
        (world, "--offload cpu"): config.place == "cpu",
        (world, "--step-in-backward"): config.step_in_backward,
        (name, f"--mesh {config.mesh}"): is_flat and config.mesh is not None,
        (name, f"--every {config.every}"): not averages and config.every is not None,
        (name, f"--inner-link {config.inner_link}"): is_flat and config.inner_link is not None,
    }
    refuse_together(pair for pair, given in refused.items() if given)
    if config.parallel == "hsdp" and config.mesh is None:
        raise InputError(f"{name}: expected --mesh {MESH} as well, received none")
    if config.step_seconds is not None and config.link is None:
        raise InputError("--step-seconds: expected --link as well, received none")
    if config.inner_link is not None and (config.link is None or config.mesh is None):
        raise InputError("--inner-link: expected --link and --mesh as well, received one of them or none")
    _mesh(config)
    parse_link(config.link)
    parse_link(config.inner_link, "inner-link")
    if config.parallel != "auto":
        refuse_together(_conflicts(config))


def _conflicts(config: EstimateConfig) -> Iterator[tuple[str, str]]:
    """Yield pairs of ``--parallel`` and options that it cannot have."""
    if config.parallel not in ("diloco", "localsgd"):
        yield from parallel_conflicts(config, config.parallel, config.compress)
        mesh = _mesh(config)
        if config.parallel == "hsdp" and mesh is not None and mesh[0] == 1 and config.compress != "none":
            yield f"--mesh {config.mesh}", f"--compress {config.compress}"
        return
    if config.weights_place is not None:
        yield f"--parallel {config.parallel}", f"--offload-weights {config.offload_weights}"
    # These keep a second copy of the weights.
    if config.optimizer == "schedule-free-adamw":
        yield f"--parallel {config.parallel}", f"--optimizer {config.optimizer}"
    if config.weights == "bf16-remainder":
        yield f"--parallel {config.parallel}", f"--weights {config.weights}"


def _mesh(config: EstimateConfig) -> tuple[int, int] | None:
    """Return the numbers of replicas and of shards, or None without ``--mesh``."""
    if config.mesh is None:
        return None
    parts = config.mesh.split("x")
    if len(parts) != 2 or not all(re.fullmatch("[1-9][0-9]{0,8}", part) for part in parts):
        raise InputError(f"--mesh: expected {MESH}, got {config.mesh}")
    replicas, shards = map(int, parts)
    if replicas * shards != config.world:
        raise InputError(
            f"--mesh: expected a product of {config.world}, the number of processes, got {config.mesh}"
        )
    return replicas, shards


def parse_link(text: str | None, name: str = "link") -> Link | None:
    """Return the link that an option describes, or None without it; raise InputError if the text describes none."""
    try:
        return None if text is None else Link.parse(text)
    except ValueError as error:
        raise InputError(f"--{name}: {error}") from None


def estimate_rank(model: nn.Module, config: EstimateConfig) -> RankEstimate:
    """Estimate a step of ``--parallel`` in ``--world`` processes; the model may be on the meta device.

    The collectives of "ddp" and "zero1" assume that gradients come in the reverse order of the parameters.

    Raises:
        InputError: the model or the options do not fit the strategy.
    """
    assert config.world is not None
    strategy, mesh = config.parallel, _mesh(config)
    setting = Setting(
        config.world,
        micro=max(1, config.accumulate // config.world),
        bits=BITS.get(config.compress),
        forward=1 / 4 if config.activations == "recompute" else 1 / 3,
        gloo=config.device == "cpu",
        replicas=mesh[0] if mesh is not None and strategy == "hsdp" else 1,
    )
    params = trained(model)
    found = Estimate(sum(p.numel() for p in model.parameters()), sum(p.numel() for p in params))
    ranks = RankEstimate(strategy, found, [])
    average = Program()
    if strategy in ("zero3", "hsdp"):
        program = _sharded(found, model, config, setting)
    elif strategy in ("zero1", "zero2"):
        program = _split(found, model, config, setting)
    else:
        found.add("device", "weights", memory.weight_bytes(model), "parameters, scales and buffers")
        found.add("device", "gradients", formulas.tensor_bytes(params), "")
        add_state(found, config, [state_sizes.optimizer_state(o) for o in optimizers_of(model, config)])
        if strategy == "ddp":
            program = rank_program.replicated(model, setting)
            _residuals(found, [bucket.elements for bucket in ddp_buckets(model)], setting.ranks, setting.bits)
        else:
            program, average = rank_program.alone(model, setting)
            averaged = rank_program.averaged_buckets(params)
            kept = 8 if strategy == "diloco" else 4
            found.add(
                "device", "averaged weights", kept * sum(averaged), "fp32, and the outer momentum of diloco"
            )
            _residuals(found, averaged, setting.ranks, setting.bits)
    items = [item for place in found.memory.values() for item in place]
    gradients = next((item.bytes or 0 for item in items if item.name == "gradients"), 0)
    peak = max(program.peak(), average.peak())
    found.add("device", "units and buckets", max(0, peak - gradients), NOTES[strategy])
    add_activations(found, model, config)
    every = config.every or EVERY.get(strategy, 1)
    ranks.collectives = program.collectives + average.collectives
    for what, size in sent_bytes(ranks.collectives, setting.gloo).items():
        found.move(SENT + what, math.ceil(size / every))
    link, inner = parse_link(config.link), parse_link(config.inner_link, "inner-link")
    if link is not None:

        def seconds(step: float) -> float:
            averages = average.seconds(0.0, link, inner, setting.gloo) / every
            return program.seconds(step, link, inner, setting.gloo) + averages

        ranks.link_seconds = seconds(0.0)
        ranks.seconds = None if config.step_seconds is None else seconds(config.step_seconds)
    return ranks


PAGE = 4096  # bytes
EVERY = {"diloco": 500, "localsgd": 8}
NOTES = {
    "ddp": "a gradient, until it is in its bucket, codes, and sums of micro-batches",
    "zero1": "a gradient, until it is in its bucket, or weights on the way",
    "zero2": "buckets that are filled or sent, sums of micro-batches, or weights on the way",
    "zero3": "gathered weights and whole gradients",
    "hsdp": "gathered weights and whole gradients",
    "diloco": "differences on the way",
    "localsgd": "differences on the way",
}


def _residuals(found: Estimate, buckets: list[int], ranks: int, bits: int | None) -> None:
    """Add what codes leave out: of the gradients, and of the means of the rank's part of each bucket."""
    if bits is None or ranks == 1:
        return
    means = [rank_program.compressed_part(elements, ranks, bits)[1] for elements in buckets]
    size = 4 * (sum(buckets) + sum(means))
    found.add("device", "residuals", size, "what the codes of compressed numbers have left out, fp32")


def _sharded(found: Estimate, model: nn.Module, config: EstimateConfig, setting: Setting) -> Program:
    shards = setting.shards
    for name, p in model.named_parameters():
        if p.ndim == 0:
            raise InputError(
                f"--parallel {config.parallel}: expected parameters with rows, received {name} without a dimension"
            )
    weights = sum(shard_bytes(p, shards) for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    own = "device"  # where gradients and state of the rank's rows are
    note = "rows of parameters, with padding"
    if config.weights_place is None:
        found.add("device", "weights", weights + buffers, note + ", and buffers")
    else:
        own = "device" if config.device == "cpu" else "host"
        if config.weights_place == "cpu":
            found.add("host", "weights", weights, note + ", page-locked")
        else:
            pages = [-(-size // PAGE) * PAGE for p in model.parameters() for size in shard_tensors(p, shards)]
            found.add("disk", "weights", sum(pages), note + ", in a file that is mapped into memory")
        found.add("device", "weights", buffers, "buffers")
    every = units(model, shards)
    found.add(own, "gradients", sum(unit.gradients for unit in every) // shards, "of these rows")

    def rows(p: Tensor) -> int:
        return shard_elements(p, shards)

    add_state(
        found, config, [state_sizes.optimizer_state(o, rows) for o in optimizers_of(model, config)], own
    )
    elements = [sum(rows(p) for p in trained_of(unit.params)) for unit in every]
    if config.parallel == "hsdp":
        _residuals(found, elements, setting.replicas, setting.bits)
    elif setting.bits is not None and setting.ranks > 1:
        found.add(
            "device",
            "residuals",
            4 * shards * sum(elements),
            "what the codes of gradients have left out, fp32",
        )
    return rank_program.sharded(model, setting)


def _split(found: Estimate, model: nn.Module, config: EstimateConfig, setting: Setting) -> Program:
    """Add the memory of the rank that has the most gradients and state."""
    found.add("device", "weights", memory.weight_bytes(model), "parameters, scales and buffers")
    whole = formulas.tensor_bytes(trained(model))
    optimizers = optimizers_of(model, config)
    arenas = [arena for o in optimizers for arena in state_sizes.optimizer_state(o).arenas]
    parts = rank_parts(arenas, setting.ranks, setting.gloo)
    splits = config.parallel == "zero2"

    def held(part: RankPart) -> int:
        return (part.gradients if splits else whole) + sum(part.state.bytes().values())

    rank = max(range(setting.ranks), key=lambda r: held(parts[r]))
    gradients = parts[rank].gradients if splits else whole
    found.add("device", "gradients", gradients, "of the elements that the rank steps" if splits else "")
    add_state(found, config, [parts[rank].state])
    params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    if not splits:
        _residuals(found, [bucket.elements for bucket in ddp_buckets(model)], setting.ranks, setting.bits)
    elif setting.bits is not None and setting.ranks > 1:
        size = 4 * sum(p.numel() for p in params)
        found.add("device", "residuals", size, "what the codes of gradients have left out, fp32")
    return rank_program.split(config.parallel, model, setting, params, parts, rank)


def choose(model: nn.Module, config: EstimateConfig) -> Choice:
    """Estimate ``--parallel``, or compare the strategies and choose the fastest that fits ``--memory``.

    Without ``--link``, the one that sends the fewest bytes is chosen. "hsdp" takes part with ``--mesh``. The training is
    the same with all; so "diloco" and "localsgd" take no part.

    Raises:
        InputError: no strategy can train with these options, or the model does not fit the strategy.
    """
    compared, reasons = [], []
    for strategy in STRATEGIES if config.parallel == "auto" else (config.parallel,):
        if strategy == "hsdp" and config.mesh is None:
            continue
        own = replace(config, parallel=strategy)
        excluded = next(_conflicts(own), None)
        if excluded is not None:
            reasons.append(f"{strategy} cannot have {excluded[1]}.")
            continue
        compared.append(estimate_rank(model, own))
    if not compared:
        raise InputError(f"--parallel auto: expected options that a strategy can have; {' '.join(reasons)}")
    budget = memory.parse_budget(config.memory, "memory")
    fitting = [each for each in compared if budget is None or each.bytes <= budget]
    for each in compared:
        if each not in fitting:
            reasons.append(
                f"{each.strategy} needs {each.bytes:,} bytes, more than the {budget:,} of --memory."
            )
    if not fitting:
        least = min(compared, key=lambda each: each.bytes)
        reasons.append(f"No strategy fits; {least.strategy} needs the least.")
        return Choice(least, compared, reasons)
    fits = "" if budget is None else " of those that fit"
    if config.parallel != "auto":
        if budget is not None:
            reasons.append(
                f"{config.parallel} needs {fitting[0].bytes:,} of the {budget:,} bytes of --memory."
            )
        return Choice(fitting[0], compared, reasons)

    def key(each: RankEstimate) -> tuple[float, float]:
        seconds = each.link_seconds if each.seconds is None else each.seconds
        return (each.sent if seconds is None else seconds, each.bytes)

    chosen = min(fitting, key=key)
    if config.link is None:
        reasons.append(f"{chosen.strategy} sends the fewest bytes{fits}; without --link, no time is known.")
    elif config.step_seconds is None:
        reasons.append(
            f"{chosen.strategy} sends for the shortest time{fits}, {chosen.link_seconds:.3g} s; without --step-seconds, the "
            "time of a step is not known."
        )
    else:
        reasons.append(f"{chosen.strategy} has the fastest step{fits}, {chosen.seconds:.3g} s.")
    return Choice(chosen, compared, reasons)
