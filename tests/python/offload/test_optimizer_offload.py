"""Results with offloaded optimizer state equal those without offload, even if copies are slow or fail."""

import copy
import errno
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from offload_faults import disturb_offload
from shoestring.optim import (
    APOLLO,
    CAME,
    LAMB,
    SGD,
    Adafactor,
    AdamW,
    AdEMAMix,
    GaLore,
    Lion,
    Muon,
    ScheduleFreeAdamW,
    load_optimizer,
    save_optimizer,
)
from shoestring.optim.base import LowMemoryOptimizer

Make = Callable[..., LowMemoryOptimizer]
RULES = (AdamW, Lion, SGD, AdEMAMix, ScheduleFreeAdamW)
WHOLE = (LAMB, Adafactor, CAME, Muon)
PLACES = pytest.mark.parametrize("place", ["cpu", "stream", "nvme"])
MICRO = 4  # number of micro-batches per optimizer step


def disturb(delay: int = 0, fail_after: int = -1, error: int = 0, short: bool = False) -> None:
    disturb_offload(delay, fail_after, error, short)


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    yield
    disturb()


def offload(place: str | None, folder: Path) -> str | None:
    return f"nvme:{folder}" if place == "nvme" else place


def weights_of(seed: int, dtype: torch.dtype, large: int) -> list[nn.Parameter]:
    """Return parameters: a matrix with ``large`` elements, whose state may be several chunks, and small ones.

    One of the small parameters has no elements, and one is frozen.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [(10, 30), (large // 64, 64), (1, 1), (0, 4), (300, 17), (20, 30)]
    params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    params[-1].requires_grad_(False)
    return params


def train(
    opt: LowMemoryOptimizer,
    params: list[nn.Parameter],
    steps: range,
    *,
    sums: bool = False,
    schedule: bool = False,
    step: Callable[[], object] | None = None,
) -> None:
    """Train parameters with random gradients.

    One parameter has no gradient in every second step. Another one has its first gradient in step 2.
    """
    for i in steps:
        generator = torch.Generator().manual_seed(1000 + i)
        if schedule:
            for group in opt.param_groups:
                group["lr"] = 1e-2 / (1 + i)
        for micro in range(MICRO if sums else 1):
            loss = torch.zeros(())
            for k, p in enumerate(params):
                if p.requires_grad and not (k == 0 and i % 2) and not (k == 4 and i < 2):
                    loss = loss + (p * torch.randn(p.shape, generator=generator).to(p.dtype)).float().sum()
            if sums and micro < MICRO - 1:
                with opt.accumulate():
                    loss.backward()
            else:
                loss.backward()
        (step or opt.step)()
        opt.zero_grad()


def entries(opt: LowMemoryOptimizer, params: list[nn.Parameter]) -> list[tuple[int, str, Tensor]]:
    found = [(k, "weight", p.detach().clone()) for k, p in enumerate(params)]
    return found + [
        (k, n, t.clone()) for k, p in enumerate(params) for n, t in sorted(opt.state.get(p, {}).items())
    ]


def expect_same(a: list[tuple[int, str, Tensor]], b: list[tuple[int, str, Tensor]]) -> None:
    assert [x[:2] for x in a] == [x[:2] for x in b]
    for (k, name, x), (_, _, y) in zip(a, b, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y), f"{name} of parameter {k}"


# Number of elements of the large parameter, by state format. Its state is larger than a chunk of 8 MiB,
# except for 4bit.
LARGE = {"fp32": 1_500_000, "bf16": 2_500_000, "8bit": 4_600_000, "4bit": 64_000}


@PLACES
@pytest.mark.parametrize("weights", ["nearest", "stochastic", "remainder"])
@pytest.mark.parametrize("state", ["fp32", "8bit", "bf16", "4bit"])
@pytest.mark.sample(12)
def test_same_as_on_the_device(place: str, state: str, weights: str, tmp_path: Path) -> None:
    """Offloaded AdamW gives the results of AdamW without offload, for every `state` and `weights` option."""
    results = []
    for where in (None, place):
        params = weights_of(1, torch.bfloat16, LARGE[state])
        opt = AdamW(
            params,
            lr=1e-2,
            state_format=state,
            weight_rounding=weights,
            seed=3,
            offload=offload(where, tmp_path),
        )
        train(opt, params, range(4))
        results.append(entries(opt, params))
    expect_same(*results)


@PLACES
@pytest.mark.parametrize("state", ["fp32", "8bit", "4bit"])
@pytest.mark.parametrize("optimizer", [*RULES, *WHOLE], ids=lambda o: o.__name__)
@pytest.mark.sample(27)
def test_every_optimizer(optimizer: Make, place: str, state: str, tmp_path: Path) -> None:
    """Every optimizer gives the same results with offload as without.

    The run has micro-batches, clipping, a schedule, a frozen parameter, two groups and min_quantize_size.
    """
    results = []
    for where in (None, place):
        params = weights_of(2, torch.bfloat16, 64_000)
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 1e-3, "min_quantize_size": 1000}]
        opt = optimizer(
            groups,
            lr=1e-2,
            state_format=state,
            weight_rounding="remainder",
            max_grad_norm=5.0,
            offload=offload(where, tmp_path),
        )
        train(opt, params, range(6), sums=True, schedule=True)
        results.append(entries(opt, params))
        assert torch.isfinite(opt.grad_norm)
        if optimizer is ScheduleFreeAdamW:
            opt.eval()
            results[-1] += [(k, "average", p.detach().clone()) for k, p in enumerate(params)]
            opt.train()
            results[-1] += [(k, "again", p.detach().clone()) for k, p in enumerate(params)]
    expect_same(*results)


def fifty_steps(where: str | None, step_in_backward: bool) -> list[tuple[int, str, Tensor]]:
    # The state of the large parameter fills half of a chunk.
    params = weights_of(3, torch.float32, 500_000)
    options = dict(max_grad_norm=5.0, step_in_backward=step_in_backward, offload=where)
    opt = AdamW(params, lr=1e-2, state_format="fp32", **options)
    train(opt, params, range(50), sums=True, schedule=True)
    return entries(opt, params)


@functools.cache
def fifty_steps_on_the_device(step_in_backward: bool) -> list[tuple[int, str, Tensor]]:
    return fifty_steps(None, step_in_backward)


@PLACES
@pytest.mark.parametrize("step_in_backward", [False, True], ids=["", "in backward"])
def test_fifty_steps_with_delays(place: str, step_in_backward: bool, tmp_path: Path) -> None:
    """Fifty offloaded steps with random delays and incomplete reads and writes equal steps without offload.

    With step_in_backward, clipping uses the norm of the previous step, except with offload="cpu", which uses
    the norm of the current gradients. The reference for offload="cpu" therefore does not use
    step_in_backward.
    """
    expected = fifty_steps_on_the_device(step_in_backward and place != "cpu")
    disturb(delay=400, short=True)
    expect_same(expected, fifty_steps(offload(place, tmp_path), step_in_backward))


@PLACES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_in_backward_of_what_chunks_divide(place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    results = []
    for where in (None, place):
        params = weights_of(4, dtype, LARGE["fp32"])
        opt = AdEMAMix(
            params,
            lr=1e-2,
            state_format="fp32",
            weight_rounding="stochastic" if dtype == torch.bfloat16 else "nearest",
            step_in_backward=True,
            offload=offload(where, tmp_path),
        )
        disturb(delay=300)
        train(opt, params, range(5), sums=True)
        results.append(entries(opt, params))
    expect_same(*results)


def test_a_column_major_parameter(tmp_path: Path) -> None:
    """A column-major parameter gives the same results with offload as without.

    The operator copies the parameter in several parts.
    """
    results = []
    for where in (None, "stream", "nvme"):
        generator = torch.Generator().manual_seed(1)
        p = nn.Parameter(torch.randn(1200, 1100, generator=generator).t())
        opt = SGD([p], state_format="fp32", lr=0.1, offload=offload(where, tmp_path))
        for _ in range(2):
            p.grad = torch.randn(1100, 1200, generator=generator)
            opt.step()
        results.append(entries(opt, [p]))
    expect_same(results[0], results[1])
    expect_same(results[0], results[2])


@PLACES
def test_checkpoints_are_the_same(place: str, tmp_path: Path) -> None:
    """Training resumes from state dicts and files if the saved run, the resumed run, or both offload."""
    through = weights_of(5, torch.bfloat16, 64_000)
    plain = AdamW(through, lr=1e-2, weight_rounding="remainder")
    train(plain, through, range(6))
    for first, second in ((place, None), (None, place), (place, place)):
        for by_file in (False, True):
            params = weights_of(5, torch.bfloat16, 64_000)
            opt = AdamW(params, lr=1e-2, weight_rounding="remainder", offload=offload(first, tmp_path))
            train(opt, params, range(3))
            resumed = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in params]
            other = AdamW(resumed, lr=1e-2, weight_rounding="remainder", offload=offload(second, tmp_path))
            if by_file:
                save_optimizer(opt, tmp_path / "optimizer.safetensors")
                load_optimizer(other, tmp_path / "optimizer.safetensors")
            else:
                other.load_state_dict(copy.deepcopy(opt.state_dict()))
            train(other, resumed, range(3, 6))
            expect_same(entries(plain, through), entries(other, resumed))
            twin = copy.deepcopy(other)
            assert twin.offload == other.offload
            same = [p for group in twin.param_groups for p in group["params"]]
            train(other, resumed, range(6, 8))
            train(twin, same, range(6, 8))
            expect_same(entries(twin, same), entries(other, resumed))


def clipped(folder: Path) -> tuple[list[nn.Parameter], AdamW]:
    params = weights_of(6, torch.float32, 2 * LARGE["fp32"])
    groups = [{"params": params[1:2]}, {"params": [params[0], *params[2:]]}]
    return params, AdamW(groups, lr=1e-2, state_format="fp32", max_grad_norm=3.0, offload=f"nvme:{folder}")


@functools.cache
def four_steps_that_succeed() -> list[tuple[int, str, Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        params, opt = clipped(Path(folder))
        train(opt, params, range(4), sums=True)
        return entries(opt, params)


@pytest.mark.parametrize("fail_after", [0, 3, 7, 12, 17, 21])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, 0], ids=["EIO", "ENOSPC", "end of file"])
@pytest.mark.sample(7)
def test_a_step_that_fails_can_be_repeated(fail_after: int, error: int, tmp_path: Path) -> None:
    """If a read or write of offloaded state fails, the error names the file, and the step can be repeated."""
    params, opt = clipped(tmp_path)
    train(opt, params, range(2), sums=True)
    failures = 0

    def step() -> None:
        nonlocal failures
        steps = {p: int(opt.state[p]["step"]) for p in params if p in opt.state}
        try:
            opt.step()
        except RuntimeError as failed:
            failures += 1
            assert f"AdamW: offload: {tmp_path}/shoestring-swap-" in str(failed)
            assert all(opt.state[p]["step"] == step for p, step in steps.items())
            opt.step()

    disturb(fail_after=fail_after, error=error)
    train(opt, params, range(2, 4), sums=True, step=step)
    assert failures == 1
    expect_same(four_steps_that_succeed(), entries(opt, params))


def test_other_gradients_do_not_finish_a_step(tmp_path: Path) -> None:
    params = weights_of(6, torch.float32, 2 * LARGE["fp32"])
    opt = AdamW(params, state_format="fp32", offload=f"nvme:{tmp_path}")
    train(opt, params, range(1))
    saved = copy.deepcopy(opt.state_dict())
    disturb(fail_after=4, error=errno.EIO)  # the read of the third chunk fails
    with pytest.raises(RuntimeError, match="Input/output error"):
        train(opt, params, range(1, 2))
    with pytest.raises(RuntimeError, match=r"AdamW: state_dict: expected a whole step.* Call step\(\) again"):
        opt.state_dict()
    opt.zero_grad()
    message = "AdamW: step: expected the gradients of the step that failed, which has stepped some parameters, received oth"
    with pytest.raises(RuntimeError, match=message):
        train(opt, params, range(1, 2))
    opt.load_state_dict(saved)
    train(opt, params, range(1, 2))


def test_errors(tmp_path: Path) -> None:
    p = nn.Parameter(torch.zeros(3))
    for bad in ("disk", "nvme:", "nvme", 3):
        with pytest.raises(
            ValueError, match='AdamW: offload: expected None, "cpu", "stream" or "nvme:DIR", received'
        ):
            AdamW([p], offload=bad)
    with pytest.raises(RuntimeError, match=f"Lion: offload: {tmp_path}/none/shoestring-swap-.*No such file"):
        Lion([p], offload=f"nvme:{tmp_path}/none")
    for optimizer in (GaLore, APOLLO):
        with pytest.raises(ValueError, match="offload: expected None, received 'stream'"):
            optimizer([p], rank=2, offload="stream")
    assert list(tmp_path.iterdir()) == []


def test_space_is_checked_first(tmp_path: Path) -> None:
    """The optimizer checks the free disk space before it writes a file.

    The test's parameter has 2^46 elements, more than fit on a disk, but is an expanded tensor of four bytes.
    """
    p = nn.Parameter(torch.zeros(1).expand(1 << 46))
    message = rf"SGD: offload: {tmp_path}: expected room for \d+ bytes on the disk, received \d+ free"
    with pytest.raises(RuntimeError, match=message):
        SGD([p], offload=f"nvme:{tmp_path}")
    opt = SGD([nn.Parameter(torch.zeros(3))], offload=f"nvme:{tmp_path}")
    with pytest.raises(RuntimeError, match=message):
        opt.add_param_group({"params": [p]})
    assert len(opt.param_groups) == 1


# The kernel's mark of the most memory that a process has held is reset, because the peak before would hide what
# follows. getrusage has no such reset, and begins with the peak of the process that started this one.
MARKS = """
import sys, torch
from shoestring.optim import AdamW, save_optimizer

def kib(name):
    return int(dict(line.split(":", 1) for line in open("/proc/self/status"))[name].split()[0])

def reset_peak():
    open("/proc/self/clear_refs", "w").write("5")
"""

MEMORY = (
    MARKS
    + """
opt2 = AdamW([torch.nn.Parameter(torch.zeros(300))], state_format="fp32")
opt2.param_groups[0]["params"][0].grad = torch.zeros(300)
opt2.step()
for n in (12_000_000, 24_000_000):
    p = opt = None
    p = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 0.5)
    opt = AdamW([p], state_format="fp32", offload=sys.argv[1])
    before = kib("VmRSS")
    reset_peak()
    opt.step()
    opt.step()
    print(kib("VmHWM") - before)
"""
)


def test_peak_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A step with 96 MB or 192 MB of offloaded state needs less than 56 MiB of memory, also the step that makes it.

    This limit is four chunks of 8 MiB, plus 24 MiB.
    """
    command = [sys.executable, "-c", MEMORY, f"nvme:{tmp_path}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peaks = [int(line) / 1024 for line in done.stdout.split()]
    assert len(peaks) == 2
    assert all(peak < 4 * 8 + 24 for peak in peaks), f"{peaks} MiB"


SAVED = (
    MARKS
    + """
def made(n, where):
    p = torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, 0.5)
    opt = AdamW([p], state_format="fp32", offload=where)
    opt.step()
    return opt

for where in (f"nvme:{sys.argv[1]}", "stream"):
    path = f"{sys.argv[1]}/{where[:4]}"
    save_optimizer(made(300, where), path)
    opt = made(12_000_000, where)
    reset_peak()
    # RssFile is measured as well, because it does not contain what the allocator may hold.
    peak, mapped = kib("VmHWM"), kib("RssFile")
    save_optimizer(opt, path)
    print(kib("VmHWM") - peak, kib("RssFile") - mapped)
    opt = None
"""
)


def test_saving_takes_no_memory(tmp_path: Path) -> None:
    """Saving 96 MB of offloaded state takes less than 16 MiB of memory, because it is copied in parts."""
    command = [sys.executable, "-c", SAVED, str(tmp_path)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == 2
    for line, name in zip(lines, ("nvme", "stre"), strict=True):
        peak, left = map(int, line.split())
        assert peak < 16 << 10 and left < 4 << 10, f"{name}: {peak} and {left} KiB"
        with safe_open(tmp_path / name, "pt") as file:
            assert (file.get_tensor("0.0.exp_avg") == 0.05).all() and file.get_tensor("0.0.step") == 1


KILLED = """
import sys, torch
from shoestring.optim import AdamW, save_optimizer
torch.manual_seed(0)
p = torch.nn.Parameter(torch.randn(3_000_000))
opt = AdamW([p], state_format="fp32", offload=f"nvme:{sys.argv[1]}")
for step in range(1000):
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
    opt.step()
    if step == 2:
        save_optimizer(opt, sys.argv[1] + "/optimizer.safetensors")
        torch.save(p, sys.argv[1] + "/p.pt")
        print("saved", flush=True)
"""


def test_a_killed_process_resumes_from_its_checkpoint_and_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sorted(os.listdir(tmp_path)) == ["optimizer.safetensors", "p.pt"]

    def steps(opt: AdamW, p: nn.Parameter, numbers: range) -> None:
        for step in numbers:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            opt.step()

    p = torch.load(tmp_path / "p.pt", weights_only=False)
    opt = AdamW([p], state_format="fp32", offload=f"nvme:{tmp_path}")
    load_optimizer(opt, tmp_path / "optimizer.safetensors")
    steps(opt, p, range(3, 5))
    torch.manual_seed(0)
    q = nn.Parameter(torch.randn(3_000_000))
    plain = AdamW([q], state_format="fp32")
    steps(plain, q, range(5))
    assert torch.equal(p, q)
    assert torch.equal(opt.state[p]["exp_avg_sq"], plain.state[q]["exp_avg_sq"])
