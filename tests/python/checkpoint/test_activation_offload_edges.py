"""Test offload_activations with compression, full disks, CUDA streams and invalid arguments."""

import contextlib
import gc
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from activation_offload_steps import assert_same, gradients, model, offload
from offload_faults import disturb_offload
from shoestring.checkpoint import offload_activations

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("compression", ["bf16", "8bit"])
def test_compression(offload_device: str, delay: int, compression: str, dtype: torch.dtype) -> None:
    context = offload(offload_device, compression=compression, max_pending=0)
    x = torch.randn(40, 1001).mul_(torch.rand(40, 1) * 30).to(dtype)
    values = [x, x[3:7, 5:]]
    handles = [context.pack_hook(v) for v in values]
    expected = [v.clone() for v in values]
    nbytes, elements = x.nbytes, x.numel()
    del x, values
    context.mark()
    context.mark()
    back = [context.unpack_hook(h) for h in handles]
    assert torch.equal(back[0][3:7, 5:], back[1])
    error = (back[0].double() - expected[0].double()).abs()
    packed = context.statistics()["copied_out"]
    if compression == "bf16" and dtype == torch.float32:
        assert (error <= expected[0].abs().double() * 2.0**-8).all() and error.max() > 0
        assert packed <= nbytes / 2 + 64
    elif compression == "8bit" and dtype in (torch.float32, torch.bfloat16, torch.float16):
        flat = nn.functional.pad(expected[0].flatten().double().abs(), (0, -elements % 256)).view(-1, 256)
        bound = 0.00704 * flat.amax(1, keepdim=True).expand_as(flat).flatten()[:elements].view_as(error)
        # Decoding 8-bit values gives fp32 values, which are rounded once more to the tensor's dtype.
        bound = bound + expected[0].abs().double() * torch.finfo(dtype).eps
        assert (error <= bound).all() and error.max() > 0
        assert packed <= elements * 65 / 64 + 256
    else:
        assert error.max() == 0 and packed >= nbytes
    assert back[0].dtype == dtype


def test_compression_of_what_is_not_finite(offload_device: str) -> None:
    x = torch.randn(1100)
    x[[3, 300, 1099]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    for compression in ("bf16", "8bit"):
        context = offload(offload_device, compression=compression, max_pending=0)
        handle = context.pack_hook(x.clone())
        context.mark()
        context.mark()
        back = context.unpack_hook(handle)
        if compression == "bf16":
            assert torch.equal(back.isnan(), x.isnan()) and torch.equal(back.isinf(), x.isinf())
            assert torch.equal(back[x.isinf()], x[x.isinf()])
        else:
            blocks = torch.arange(1100) // 256
            bad = torch.isin(blocks, torch.tensor([0, 1, 4]))
            assert torch.equal(back.isnan(), bad) and back[~bad].isfinite().all()


@pytest.mark.parametrize("compression", ["bf16", "8bit"])
@pytest.mark.parametrize(("marks", "max_pending"), [(True, 2), (False, 5)])
def test_compressed_values_do_not_depend_on_the_speed_of_copies(
    offload_device: str, marks: bool, max_pending: int, compression: str
) -> None:
    """The order of saving decides which storages backward reads compressed."""
    net, x = model(6), torch.randn(20, 48, requires_grad=True)
    context = offload(offload_device, compression=compression, max_pending=max_pending)
    if marks:
        context.mark_layers(net)
    pause = [0.0]
    for block in net:
        block.register_forward_hook(lambda *_: time.sleep(pause[0]))
    seen = []
    for delay, pause[0] in ((0, 0.02), (10_000, 0.0), (0, 0.0)):  # copies that end early, late, and anyhow
        disturb_offload(delay)
        before = context.statistics()["copied_out"]
        try:
            seen.append((gradients(net, x, context), context.statistics()["copied_out"] - before))
        finally:
            disturb_offload()
    for grads, copied in seen[1:]:
        assert_same(grads, seen[0][0])
        assert copied == seen[0][1]
    exact = gradients(net, x, contextlib.nullcontext())
    assert any(not torch.equal(a, b) for a, b in zip(seen[0][0], exact, strict=True))


def noise(compression: str, draw: int) -> contextlib.AbstractContextManager:
    """Return a context that adds to saved activations random errors as large as compression may make.

    Zeros stay zeros, as in compressed tensors.
    """
    generator = torch.Generator("cpu").manual_seed(
        draw
    )  # the errors must not change the random state of dropout

    def pack(x: Tensor) -> Tensor:
        if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) or not x.is_floating_point():
            return x
        if compression == "bf16":
            bound = x.abs() * 2**-8
        else:
            bound = 0.00704 * torch.stack([block.abs().max() for block in x.flatten().split(256)])
            bound = bound.repeat_interleave(256)[: x.numel()].view_as(x)
        uniform = torch.rand(x.shape, generator=generator, device="cpu").to(x.device)
        return x + bound * (2 * uniform - 1) * (x != 0)

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)


def test_training_with_compressed_activations(offload_device: str) -> None:
    """Compression changes the gradients by no more than random errors of the documented size do."""
    net, x = model(4), torch.randn(64, 48, requires_grad=True)
    exact = torch.cat([g.flatten() for g in gradients(net, x, contextlib.nullcontext())])

    def error(context: contextlib.AbstractContextManager) -> float:
        received = torch.cat([g.flatten() for g in gradients(net, x, context)])
        return float((received - exact).norm() / exact.norm())

    for compression in ("bf16", "8bit"):
        received = error(offload(offload_device, compression=compression, max_pending=0))
        bound = max(error(noise(compression, draw)) for draw in range(8))
        print(compression, received, bound)
        assert 0 < received <= bound


def test_a_full_disk_is_an_error_and_the_step_can_be_repeated(offload_device: str, tmp_path: Path) -> None:
    net, x = model(), torch.randn(20, 48, requires_grad=True)
    expected = gradients(net, x, contextlib.nullcontext())
    context = offload(offload_device, folder=str(tmp_path))
    assert_same(gradients(net, x, context), expected)
    # From now on, three reads or writes of offload files succeed, and the fourth fails with ENOSPC (28).
    disturb_offload(0, 3, 28)
    with pytest.raises(
        RuntimeError, match=rf"offload_activations: {tmp_path}/.* cannot write .* free some space"
    ):
        for _ in range(3):
            gradients(net, x, context)
    disturb_offload()
    gc.collect()
    assert_same(gradients(net, x, context), expected)
    assert context.statistics()["entries"] == 0


def test_a_file_system_without_room(offload_device: str, tmp_path: Path) -> None:
    if (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "shoestring", tmp_path], capture_output=True
        ).returncode
        != 0
    ):
        pytest.skip("this user may not mount a file system of 1 MiB")
    try:
        net, x = model(2), torch.randn(20, 48, requires_grad=True)
        expected = gradients(net, x, contextlib.nullcontext())
        context = offload(offload_device, folder=str(tmp_path))
        with pytest.raises(
            RuntimeError, match=rf"offload_activations: {tmp_path}: expected room for \d+ bytes"
        ):
            gradients(net, torch.randn(20_000, 48, requires_grad=True), context)
        gc.collect()
        assert context.statistics()["entries"] == 0 and context.statistics()["live"] == 0
        assert_same(gradients(net, x, context), expected)
        del context
        gc.collect()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_cpu_tensors_among_those_of_a_gpu(backend: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    context = offload("cuda")
    here, there = torch.randn(100, device="cpu"), torch.randn(100, device="cuda")
    for x in (here, there):
        handle, value = context.pack_hook(x), x.clone()
        assert torch.equal(context.unpack_hook(handle), value)
    assert context.statistics()["stored"] == there.nbytes


def test_other_streams(backend: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    net, x = model().cuda(), torch.randn(4096, 48, device="cuda", requires_grad=True)
    expected = gradients(net, x, contextlib.nullcontext())
    context, stream = offload("cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            received = gradients(net, x, context)
        torch.cuda.current_stream().wait_stream(stream)
        assert_same(received, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "int3"}, "compression: expected none, bf16 or 8bit, received 'int3'"),
        ({"prefetch": -1}, "prefetch: expected a number of layers of at least 0, received -1"),
        ({"max_pending": -1}, "max_pending: expected a number of layers of at least 0, received -1"),
        ({"min_bytes": -1}, "min_bytes: expected at least 0, received -1"),
        ({"folder": "/nowhere"}, "/nowhere/shoestring-swap.*No such file"),
        ({"device": "meta"}, "device: expected the CPU or an accelerator of this PyTorch, received meta"),
    ],
)
def test_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"offload_activations: .*{message}"):
        offload_activations(**options)


def test_host_limit_without_a_folder() -> None:
    with pytest.raises(
        ValueError,
        match="host_bytes: expected a folder for tensors beyond this limit, received 5 and no folder",
    ):
        offload_activations(host_bytes=5)


def test_waiting_for_what_is_on_its_way(offload_device: str) -> None:
    context = offload(offload_device, max_pending=9)
    disturb_offload(20_000)
    try:
        with context:
            kept = [context.pack_hook(torch.randn(5000)) for _ in range(4)]
        for _ in range(2):
            context.mark()
        for left in (40_000, 20_000, 0):
            context.wait(left)
            assert context.statistics()["copied_out"] >= 80_000 - left
    finally:
        disturb_offload()
    assert len(kept) == 4


def test_a_tensor_of_the_last_layer_is_read_twice(offload_device: str) -> None:
    """The copy of a tensor that backward has read is given up, so the tensor must stay for a second read."""
    context = offload(offload_device, max_pending=0)
    values: list[Tensor] = []

    class ReadsTwice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 3)
            return x.sum()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
            values.append(ctx.saved_tensors[0].clone())
            with context:
                for _ in range(3):
                    context.pack_hook(torch.randn(5000))
                    context.mark()
            values.append(ctx.saved_tensors[0].clone())
            return grad.expand(5000)

    x = torch.randn(5000, requires_grad=True)
    disturb_offload(20_000)  # the copy has not begun when backward reads
    try:
        with context:
            loss = ReadsTwice.apply(x)
        loss.backward()
    finally:
        disturb_offload()
    assert all(torch.equal(value, 3 * x) for value in values) and len(values) == 2


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_the_link_is_measured(offload_device: str, host_bytes: int, tmp_path: Path) -> None:
    context = offload(offload_device, folder=str(tmp_path), host_bytes=host_bytes, prefetch=3)
    link = context.measure_link(1 << 20)
    assert 1e6 < link["out_bytes_per_second"] < 1e13 and 1e6 < link["in_bytes_per_second"] < 1e13
    assert 0 <= link["copy_share"] <= 1 and link["prefetch"] == 3
    seen = context.statistics()
    # measuring the bandwidth leaves no memory allocated
    assert seen["stored"] == seen["host"] == seen["disk"] == 0
