"""The work, messages and memory of a rank in a training step, for each strategy of ``shoestring.parallelize``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from shoestring.distributed.diloco import BUCKET
from shoestring.distributed.groups import operators
from shoestring.distributed.links import Collective
from shoestring.distributed.rank_layout import (
    Bucket,
    Range,
    RankPart,
    Unit,
    compute_shares,
    ddp_buckets,
    heads,
    owned_buckets,
    shard_elements,
    tables,
    trained_of,
    units,
)
from shoestring.distributed.shard import BUCKET_BYTES
from shoestring.distributed.step_program import Program
from shoestring.quantization.compress_gradient import compressed_gradient_bytes

UNDER_WAY = 4  # buckets of ZeRO-2 that are sent at the same time


@dataclass(frozen=True)
class Setting:
    """Settings on which the programs of all strategies depend.

    Attributes:
        ranks: the number of processes.
        micro: micro-batches of a rank in a step.
        bits: the bits of an element of compressed gradients, or None.
        forward: the share of forward in the computation; backward is the rest.
        gloo: whether the ranks are CPU processes that Gloo connects.
        replicas: for HSDP, the number of machines, between which gradients are averaged.
    """

    ranks: int
    micro: int = 1
    bits: int | None = None
    forward: float = 1 / 3
    gloo: bool = True
    replicas: int = 1

    @property
    def shards(self) -> int:
        """The number of ranks that split weights."""
        return self.ranks // self.replicas


def backward(
    program: Program,
    model: nn.Module,
    setting: Setting,
    before: Callable[[Tensor], None] = lambda param: None,
) -> Iterator[Tensor]:
    """Compute the gradients of a micro-batch one after the other, and yield each parameter when it has its gradient.

    The gradient of a head that is also the embedding is held from the start, and complete at the end. ``before`` is
    called with each parameter before its gradient is computed.
    """
    params, shares = list(model.parameters())[::-1], compute_shares(model)
    both = {id(p) for p in tables(model)} & {id(p) for p in heads(model)}
    tied = {id(p) for p in params if id(p) in both and p.requires_grad}
    for p in params:
        program.hold(p.nbytes if id(p) in tied else 0)
    for p in params:
        before(p)
        program.compute((1 - setting.forward) / setting.micro * shares[id(p)])
        program.hold(p.nbytes if p.requires_grad else 0)
        program.hold(-p.nbytes if id(p) in tied else 0)  # the two gradients are added up
        yield p


def micro_batches(program: Program, model: nn.Module, setting: Setting, sums: int = 0) -> None:
    """Add the micro-batches before the last one.

    Gradients are added up where the first ones are, or in ``sums`` bytes, which stay from step to step.
    """
    program.hold(sums if setting.micro > 1 else 0)
    for number in range(setting.micro - 1):
        program.compute(setting.forward / setting.micro)
        for p in backward(program, model, setting):
            if p.requires_grad and (sums or number > 0):
                program.hold(-p.nbytes)


def replicated(model: nn.Module, setting: Setting) -> Program:
    """Return the program of "ddp": buckets are averaged while backward computes the others."""
    program = Program()
    program.hold(
        sum(p.nbytes for p in trained_of(model.parameters()))
    )  # gradients are views of the buckets, which stay
    micro_batches(program, model, setting)
    program.compute(setting.forward / setting.micro)
    buckets = ddp_buckets(model)
    sender = _Buckets(program, setting)
    missing = [{id(p) for p in bucket.params} for bucket in buckets]
    sent = 0
    for p in backward(program, model, setting):
        if not p.requires_grad:
            continue
        # The gradient is copied to its bucket, with the sum of other micro-batches.
        program.hold(-p.nbytes * (2 if setting.micro > 1 else 1))
        for ids in missing:
            ids.discard(id(p))
        while sent < len(buckets) and not missing[sent]:
            sender.send(buckets[sent].elements, buckets[sent].bytes, sent == len(buckets) - 1)
            sent += 1
    sender.finish()
    return program


class _Buckets:
    """Averages buckets over all ranks: by all-reduce, or compressed in two hops as csrc/distributed/compressor.cpp."""

    def __init__(self, program: Program, setting: Setting, what: str = "gradients") -> None:
        self._program, self._setting, self._what = program, setting, what
        self._works: list[int] = []
        self._flights: deque[tuple[int, int, bool]] = deque()  # collective, bytes of codes, whether of means
        self._means: deque[int] = deque()  # bytes of the means that the rank computes, of each bucket

    def send(self, elements: int, size: int, is_last: bool) -> None:
        """Begin to average a bucket."""
        program, ranks = self._program, self._setting.ranks
        if self._setting.bits is None:
            self._works.append(program.send(Collective("all-reduce", size, ranks, self._what)))
            return
        part_bytes, part_elements = compressed_part(elements, ranks, self._setting.bits)
        codes = ranks * part_bytes
        program.hold(2 * codes)
        work = program.send(Collective("all-to-all", codes, ranks, self._what))
        self._flights.append((work, codes, False))
        self._means.append(4 * part_elements)
        for i in range(len(self._flights) - (0 if is_last else 1)):
            number, size, is_second = self._flights[i]
            if not is_second:
                program.wait(number)
                means = self._means.popleft()
                program.hold(means)
                number = program.send(Collective("all-gather", size, ranks, self._what))
                program.hold(-means)
                self._flights[i] = (number, size, True)
        while len(self._flights) > (0 if is_last else 2):
            number, size, _ = self._flights.popleft()
            program.wait(number)
            program.hold(-2 * size)

    def finish(self) -> None:
        """Wait for all buckets."""
        self._program.wait(*self._works)


def compressed_part(elements: int, ranks: int, bits: int) -> tuple[int, int]:
    """Return the bytes of the codes, and the elements, of the first of ``ranks`` parts of a bucket."""
    found: tuple[int, int] = operators()._compressed_part(elements, ranks, 0, bits)
    return found


def copy_parts(program: Program, setting: Setting, ranges: Sequence[Sequence[Range]]) -> None:
    """Add the copies of the weights that each rank has stepped to all ranks. Gloo gathers into a buffer of its own."""
    ranks = len(ranges)
    most = max(sum(piece.bytes for piece in own) for own in ranges)
    if ranks == 1 or most == 0:
        return
    chunk = min(operators()._gather_chunk(ranks), most)
    count = math.ceil(most / chunk)
    buffers = 2 * (ranks + 1) * chunk + min(2, count) * (ranks * chunk if setting.gloo else 0)
    program.hold(buffers)
    last = None
    for _ in range(count):
        work = program.send(Collective("all-gather", chunk * ranks, ranks, "weights"))
        if last is not None:
            program.wait(last)
        last = work
    if last is not None:
        program.wait(last)
    program.hold(-buffers)


def split_gradients(
    model: nn.Module,
    setting: Setting,
    params: Sequence[Tensor],
    ranges: list[list[Range]],
    rank: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> Program:
    """Return the program of "zero2" of a rank: backward sends each gradient to the rank that steps it.

    Args:
        params: the trained parameters in the order of the optimizer.
        ranges: what each rank steps.
        rank: the rank whose memory the program counts; it holds its own gradients at the end.
    """
    program, ranks = Program(), setting.ranks
    micro_batches(program, model, setting, 4 * sum(p.numel() for p in params))
    program.compute(setting.forward / setting.micro)
    buckets = owned_buckets(params, ranges, bucket_bytes)
    missing = [len(bucket.params) for bucket in buckets]
    of_param: dict[int, list[int]] = {}
    for index, bucket in enumerate(buckets):
        for p in bucket.params:
            of_param.setdefault(id(p), []).append(index)
    under_way: deque[tuple[Bucket, int]] = deque()
    opened: set[int] = set()
    sent = 0

    def codes(bucket: Bucket) -> int:
        return 0 if setting.bits is None else compressed_gradient_bytes(bucket.elements, bits=setting.bits)

    def send(bucket: Bucket) -> None:
        if setting.bits is None:
            work = program.send(Collective("reduce", bucket.bytes, ranks, "gradients"))
        else:
            program.hold(codes(bucket) - bucket.bytes)
            program.hold(ranks * codes(bucket) if bucket.owner == rank else 0)
            work = program.send(Collective("gather", ranks * codes(bucket), ranks, "gradients"))
        under_way.append((bucket, work))

    def receive() -> None:
        bucket, work = under_way.popleft()
        program.wait(work)
        if setting.bits is not None:
            program.hold(bucket.bytes if bucket.owner == rank else 0)
            program.hold(-codes(bucket) * (1 + (ranks if bucket.owner == rank else 0)))
        elif bucket.owner != rank:
            program.hold(-bucket.bytes)

    for p in backward(program, model, setting):
        if not p.requires_grad:
            continue
        for index in of_param.get(id(p), []):
            if index not in opened:
                opened.add(index)
                program.hold(buckets[index].bytes)
            missing[index] -= 1
        program.hold(-p.nbytes)
        while sent < len(buckets) and not missing[sent]:
            send(buckets[sent])
            sent += 1
            while len(under_way) > UNDER_WAY:
                receive()
    while under_way:
        receive()
    copy_parts(program, setting, ranges)
    return program


class _Gathering:
    """Gathers units, and scatters their gradients, in the order of ``fully_shard``."""

    def __init__(self, program: Program, setting: Setting) -> None:
        self.program, self.setting = program, setting
        self._works: dict[int, int] = {}
        self._kept = 0  # the buffer of the last all-gather of forward, which is freed later
        self._input = 0  # the input of the last reduce-scatter, which is freed later
        self._scatter: int | None = None

    def _collective(self, kind: str, size: int, what: str) -> int:
        inner = self.setting.replicas > 1
        return self.program.send(Collective(kind, size, self.setting.shards, what, inner))

    def gather(self, unit: Unit) -> None:
        """Begin to gather a unit. On the CPU, this waits."""
        if unit.gathered == 0:
            return
        if self.setting.shards == 1:
            return
        self.program.hold(unit.gathered)
        self._works[id(unit)] = self._collective("all-gather", unit.gathered, "weights")
        if self.setting.gloo:
            self.program.hold(unit.gathered)  # of Gloo
            self.program.wait(self._works[id(unit)])
            self.program.hold(-unit.gathered)

    def use(self, unit: Unit, is_forward: bool) -> None:
        """Wait for a unit that is being gathered, and copy it to its parameters."""
        if unit.gathered == 0:
            return
        if self.setting.shards == 1:
            self.program.hold(unit.gathered)
            return
        self.program.wait(self._works.pop(id(unit)))
        if is_forward:
            self.end_forward()
        self.program.hold(unit.gathered)
        if is_forward:
            self._kept = unit.gathered
        else:
            self.program.hold(-unit.gathered)

    def free(self, unit: Unit) -> None:
        """Free the gathered weights of a unit."""
        self.program.hold(-unit.gathered)

    def end_forward(self) -> None:
        """Free the buffer of the last all-gather."""
        self.program.hold(-self._kept)
        self._kept = 0

    def scatter(self, unit: Unit, gradients: int) -> None:
        """Reduce the gradients of a unit, of which the rank holds ``gradients`` bytes."""
        size, shards, bits = unit.gradients, self.setting.shards, self.setting.bits
        if size == 0:
            return
        program = self.program
        if self._scatter is not None:
            program.wait(self._scatter)
        program.hold(-self._input)
        program.hold(size)
        if self.setting.gloo:
            # On the CPU, PyTorch pads copies of gradients whose rows the ranks do not divide.
            uneven = [p for p in trained_of(unit.params) if p.shape[0] % shards]
            padding = Unit(tuple(uneven), shards).gradients
            program.hold(padding)
            program.hold(-padding)
        last = trained_of(unit.params)[-1].nbytes if shards > 1 else 0
        program.hold(last - gradients)  # PyTorch frees the last gradient when the collective has begun
        program.hold(size // shards)
        self._input = size
        work = None
        replicas = self.setting.replicas
        elements = sum(shard_elements(p, shards) for p in trained_of(unit.params))
        if shards > 1 and (bits is None or replicas > 1):
            work = self._collective("reduce-scatter", size, "gradients")
            if self.setting.gloo:  # Gloo reduces a copy
                program.hold(size)
                program.hold(-size)
        elif bits is not None and shards > 1:
            codes = shards * compressed_gradient_bytes(elements, bits=bits)
            program.hold(2 * codes)
            work = self._collective("all-to-all", codes, "gradients")
            program.hold(-2 * codes)
        program.hold(-last)
        if replicas > 1 and bits is None:
            work = self._over_replicas("all-reduce", size // shards, work)
        elif replicas > 1 and bits is not None:  # as Compressor::all_reduce in C++
            part_bytes, part_elements = compressed_part(elements, replicas, bits)
            codes, means = replicas * part_bytes, 4 * part_elements
            program.hold(2 * codes)
            work = self._over_replicas("all-to-all", codes, work)
            program.hold(means)
            work = self._over_replicas("all-gather", codes, work)
            program.hold(-means)
            program.hold(-2 * codes)
        if self.setting.gloo and work is not None:
            program.wait(work)
        self._scatter = work

    def _over_replicas(self, kind: str, size: int, work: int | None) -> int:
        """Begin a collective between machines after the one before, for whose end the CPU waits."""
        if self.setting.gloo and work is not None:
            self.program.wait(work)
        collective = Collective(kind, size, self.setting.replicas, "gradients")
        return self.program.send(collective, after=work)

    def finish(self) -> None:
        """End a backward."""
        if self._scatter is not None:
            self.program.wait(self._scatter)
        self.program.hold(-self._input)
        self._input, self._scatter = 0, None


def sharded(model: nn.Module, setting: Setting) -> Program:
    """Return the program of "zero3" and "hsdp".

    Forward gathers each block before it computes it, and frees it. Backward gathers each block again, while the block
    after it is computed; on the CPU, ``fully_shard`` waits for each collective. The parameters outside of blocks stay
    gathered from forward to backward.
    """
    program = Program()
    *blocks, root = units(model, setting.shards)
    run = _Gathering(program, setting)
    shares = compute_shares(model)
    of_unit = {id(p): number for number, unit in enumerate([*blocks, root]) for p in unit.params}
    forward = setting.forward / setting.micro
    last = {
        of_unit[id(p)]: p for p in reversed(list(model.parameters()))
    }  # the parameter of each unit whose gradient comes last

    at = 0  # the block whose backward has begun

    def begin(param: Tensor) -> None:
        nonlocal at
        if of_unit[id(param)] < at:  # the first parameter of a block
            at = of_unit[id(param)]
            run.use(blocks[at], is_forward=False)
            if at > 0:
                run.gather(blocks[at - 1])

    for micro in range(setting.micro):
        sends = micro == setting.micro - 1
        run.gather(root)
        run.use(root, is_forward=True)
        if blocks and not setting.gloo:
            run.gather(blocks[0])
        for number, unit in enumerate(blocks):
            if setting.gloo:
                run.gather(unit)
            run.use(unit, is_forward=True)
            if number + 1 < len(blocks) and not setting.gloo:
                run.gather(blocks[number + 1])
            program.compute(forward * sum(shares[id(p)] for p in unit.params))
            run.free(unit)
        program.compute(forward * sum(shares[id(p)] for p in root.params))
        run.end_forward()
        gradients = [0] * (len(blocks) + 1)
        at = len(blocks)
        if blocks:
            run.gather(blocks[-1])
        for p in backward(program, model, setting, begin):
            number = of_unit[id(p)]
            if p.requires_grad:
                program.hold(-p.nbytes if micro > 0 else 0)  # it is added to that of the first micro-batch
                gradients[number] += p.nbytes
            if p is last[number] and number < len(blocks):
                run.free(blocks[number])
                if sends:
                    run.scatter(blocks[number], gradients[number])
        run.free(root)
        if sends:
            run.scatter(root, gradients[-1])
        run.finish()
    return program


def split(
    strategy: str,
    model: nn.Module,
    setting: Setting,
    params: Sequence[Tensor],
    parts: Sequence[RankPart],
    rank: int,
) -> Program:
    """Return the program of "zero1" or "zero2" of a rank.

    Args:
        strategy: the strategy.
        model: the model.
        setting: the processes.
        params: the trained parameters in the order of the optimizer.
        parts: what each rank steps.
        rank: the rank whose memory the program of "zero2" counts.
    """
    ranges = [part.ranges for part in parts]
    if strategy == "zero2":
        return split_gradients(model, setting, params, ranges, rank)
    program = replicated(model, setting)
    copy_parts(program, setting, ranges)
    return program


def alone(model: nn.Module, setting: Setting) -> tuple[Program, Program]:
    """Return the program of a step of "diloco" and "localsgd", and that of an average of all weights."""
    step, average = Program(), Program()
    step.hold(sum(p.nbytes for p in trained_of(model.parameters())))
    step.compute(1.0)
    if setting.ranks == 1:
        return step, average
    sender = _Buckets(average, setting, "weights")
    sizes = averaged_buckets(trained_of(model.parameters()))
    for number, elements in enumerate(sizes):
        average.hold(4 * elements)
        sender.send(elements, 4 * elements, number == len(sizes) - 1)
    sender.finish()
    average.hold(-4 * sum(sizes))  # no weight changes before all differences have arrived
    return step, average


def averaged_buckets(params: Sequence[Tensor]) -> list[int]:
    """Return the elements of each bucket of weights that DiLoCo averages."""
    buckets = operators()._averaged_buckets([*params], BUCKET)
    return [sum(params[i].numel() for i in bucket) for bucket in buckets]
