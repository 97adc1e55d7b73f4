"""Offloading saved activations changes no bit of the gradients, however long the copies are delayed."""

import contextlib
import gc
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoestring
from activation_offload_steps import assert_same, gradients, model, offload
from offload_faults import disturb_offload

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("place", ["host", "disk", "both"])
@pytest.mark.parametrize(("prefetch", "max_pending"), [(1, 2), (0, 0), (4, 1)])
@pytest.mark.sample(18)
def test_gradients_are_the_same_bits(
    offload_device: str, delay: int, marks: bool, place: str, prefetch: int, max_pending: int, tmp_path: Path
) -> None:
    net, x = model(), torch.randn(20, 48, requires_grad=True)
    expected = gradients(net, x, contextlib.nullcontext())
    where = {
        "host": {},
        "disk": {"folder": str(tmp_path)},
        "both": {"folder": str(tmp_path), "host_bytes": 1 << 16},
    }
    context = offload(offload_device, prefetch=prefetch, max_pending=max_pending, **where[place])
    if marks:
        context.mark_layers(net)
    seen = []
    for _ in range(4):
        assert_same(gradients(net, x, context), expected)
        seen.append(context.statistics())
        assert seen[-1]["entries"] == 0 and seen[-1]["live"] == 0
    # Offloading in step 4 uses no more host memory than in step 2, and no more disk space than in step 1.
    assert seen[-1]["host"] == seen[1]["host"] and seen[-1]["disk"] == seen[0]["disk"]
    assert (seen[0]["disk"] > 0) == (place != "host")
    # The last layer's activations stay on the device, so they are not copied back.
    assert 0 < seen[0]["reloaded"] < seen[0]["stored"]
    assert seen[0]["stored"] * 4 == seen[3]["stored"]


def test_a_storage_travels_once(offload_device: str, delay: int) -> None:
    leaf = torch.randn(64, 64, requires_grad=True)

    def gradient(context: contextlib.AbstractContextManager) -> Tensor:
        with context:
            x = leaf * 2
            views = [
                x,
                x.t(),
                x[3:40, ::2],
                x.view(-1)[5:4000],
                x[:, 7].expand(9, 64),
                x.as_strided((5, 3), (11, 2), 17),
            ]
            loss = sum((v * v).sum() for v in views)
        del x, views
        return torch.autograd.grad(loss, leaf)[0]

    context = offload(offload_device, max_pending=0)
    expected = gradient(contextlib.nullcontext())
    assert torch.equal(gradient(context), expected)
    assert context.statistics()["stored"] == leaf.nbytes


def test_saved_tensors_keep_their_sizes_strides_offsets_and_types(offload_device: str, delay: int) -> None:
    context = offload(offload_device)
    base = torch.randn(32, 40)
    values = [
        base.t(),
        base[4:, 3::2],
        base.expand(3, 32, 40),
        base.to(torch.bfloat16)[1:],
        torch.randint(9, (500,)),
        base > 0,
        base.view(torch.int32)[2],
        torch.randn(70, dtype=torch.complex64),
        base[:0],
        base[5, 6],
    ]
    originals = [(v.clone(), v.stride(), v.storage_offset()) for v in values]
    with context:
        stored = [context.pack_hook(v) for v in values]
    del base, values
    context.mark()
    context.mark()
    for handle, (value, stride, start) in zip(stored, originals, strict=True):
        for _ in range(2):
            x = context.unpack_hook(handle)
            assert (
                x.dtype == value.dtype
                and x.stride() == stride
                and x.storage_offset() == start
                and torch.equal(x, value)
            )


def test_what_lives_on_stays(offload_device: str) -> None:
    net = model(1)
    net[0].norm.requires_grad_(False)
    context = offload(offload_device, exclude=net, min_bytes=0)
    for x in [
        net[0].up.weight,
        net[0].up.weight.t(),
        net[0].up.weight[2:],
        net[0].norm.weight,
        net[0].frozen,
        net[0].frozen.t(),
        net[0].gain,
        net[0].gain[1:],
    ]:
        context.pack_hook(x)
    assert context.statistics()["stored"] == 0
    # Without the argument `exclude`, offload_activations still recognises parameters and their views.
    other = offload(offload_device)
    for x in [
        net[0].up.weight,
        net[0].up.weight.t().detach().requires_grad_(),
        net[0].frozen,
        net[0].frozen[3:],
    ]:
        other.pack_hook(x)
    for x in [torch.eye(30).to_sparse(), torch.zeros(0)]:
        assert torch.equal(other.unpack_hook(other.pack_hook(x)).to_dense(), x.to_dense())
    assert other.statistics()["stored"] == 0
    other.pack_hook(torch.zeros(15))
    assert other.statistics()["stored"] == 0  # 60 bytes are less than min_bytes, which is 64
    other.pack_hook(torch.zeros(16))
    assert other.statistics()["stored"] == 64
    conjugate = torch.randn(90, dtype=torch.complex64).conj()
    assert torch.equal(other.unpack_hook(other.pack_hook(conjugate)), conjugate)


class _Reads(torch.autograd.Function):
    """An autograd function whose backward reads the Python attribute ``scale`` of a saved weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grads[0] * weight.scale, None


def test_frozen_tensors_that_stay_keep_their_attributes(offload_device: str) -> None:
    x = torch.ones(4, device=offload_device, requires_grad=True)
    for weight in (
        torch.nn.Parameter(torch.ones(4096, device=offload_device), requires_grad=False),
        torch.ones(8, device=offload_device),
    ):
        weight.scale = 3.0  # type: ignore[attr-defined]
        with offload(offload_device):
            y = _Reads.apply(x, weight)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, torch.full_like(x, 3.0))


def test_what_somebody_holds_is_not_copied_back(offload_device: str) -> None:
    context = offload(offload_device)
    x = torch.randn(100)
    stored = context.pack_hook(x)
    for _ in range(3):
        context.mark()
    assert context.unpack_hook(stored).data_ptr() == x.data_ptr() and context.statistics()["reloaded"] == 0


def test_sources_are_freed_and_memory_does_not_grow_with_depth(
    offload_device: str, delay: int, tmp_path: Path
) -> None:
    for options in ({}, {"folder": str(tmp_path)}):
        for depth in (6, 24):
            context = offload(offload_device, max_pending=1, **options)
            alive: list[torch.UntypedStorage] = []
            handles, most = [], 0
            for _ in range(depth):
                context.mark()
                x = torch.randn(1 << 18)
                alive.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
                handles.append(context.pack_hook(x))
                del x
                most = max(most, sum(not ref.expired() for ref in alive))
            # At most three storages are alive: the newest one, and older ones whose copies to the host have
            # not finished.
            assert most <= 3
            if options:
                assert context.statistics()["host"] <= 16 << 20
            alive = []
            for handle in reversed(handles):
                x = context.unpack_hook(handle)
                alive.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
                del x
                # In backward, two storages may be alive: the current one, and that of the last layer, which
                # is not offloaded.
                assert sum(not ref.expired() for ref in alive) <= 2


def test_what_is_copied_out_counts_when_it_is_done(offload_device: str) -> None:
    disturb_offload(60_000)
    try:
        context = offload(offload_device, max_pending=100)
        handle = context.pack_hook(torch.randn(1000))
        context.mark()
        began = time.perf_counter()
        while context.statistics()["copied_out"] == 0:
            assert time.perf_counter() - began < 10
            time.sleep(1e-3)
        # The tensor has 4000 bytes, which offloading rounds up to a multiple of 64.
        assert context.statistics()["copied_out"] == 4032
        context.unpack_hook(handle)
        assert context.statistics()["reloaded"] == 4000
    finally:
        disturb_offload()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_layers_come_back_ahead_of_backward(offload_device: str, delay: int, prefetch: int) -> None:
    context = offload(offload_device, prefetch=prefetch, max_pending=0)
    handles = []
    for _ in range(8):
        context.mark()
        # each of 8 layers saves two tensors
        handles += [context.pack_hook(torch.randn(1000)) for _ in range(2)]
    context.unpack_hook(handles[15])
    assert context.statistics()["reloaded"] == 8000 * prefetch
    context.unpack_hook(handles[14])
    context.unpack_hook(handles[13])
    assert context.statistics()["reloaded"] == 8000 * prefetch + (8000 if prefetch else 4000)
    # An offloaded storage is not copied back if the handle that pack_hook returned for it is deleted.
    del handles[3:14]
    context.unpack_hook(handles[2])
    assert context.statistics()["reloaded"] <= 8000 * (2 * prefetch + 2) + 4000


def test_backward_twice_and_double_backward(offload_device: str, delay: int) -> None:
    net, x = model(3, 32), torch.randn(8, 32, requires_grad=True)

    def twice(context: contextlib.AbstractContextManager) -> list[Tensor]:
        torch.manual_seed(5)
        with context:
            loss = net(x).square().mean()
        first = torch.autograd.grad(loss, [x, net[0].up.weight], retain_graph=True)
        second = torch.autograd.grad(loss, [x, net[0].up.weight], retain_graph=True)
        torch.manual_seed(6)
        with context:
            (slope,) = torch.autograd.grad(loss, [x], create_graph=True)
        return [
            *first,
            *second,
            *torch.autograd.grad(slope.square().sum(), [x, net[0].up.weight, net[2].norm.weight]),
        ]

    expected = twice(contextlib.nullcontext())
    context = offload(offload_device)
    for _ in range(3):
        assert_same(twice(context), expected)
    gc.collect()
    assert context.statistics()["entries"] == 0


def test_exceptions_and_steps_without_backward_give_everything_back(
    offload_device: str, delay: int, tmp_path: Path
) -> None:
    net, x = model(), torch.randn(20, 48, requires_grad=True)
    expected = gradients(net, x, contextlib.nullcontext())

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise ValueError("broken backward")

    for options in ({}, {"folder": str(tmp_path)}):
        context = offload(offload_device, **options)
        with pytest.raises(ValueError, match="broken forward"), context:
            net(x)
            raise ValueError("broken forward")
        with context:
            net[2:](Broken.apply(net[:2](x))).sum()
        with context:
            loss = net[2:](Broken.apply(net[:2](x))).sum()
        with pytest.raises(ValueError, match="broken backward"):
            loss.backward()
        del loss
        gc.collect()
        if x.is_cuda:
            torch.cuda.synchronize()
        assert context.statistics()["entries"] == 0 and context.statistics()["live"] == 0
        assert_same(gradients(net, x, context), expected)


def test_changes_in_place_are_an_error(offload_device: str) -> None:
    context = offload(offload_device)
    leaf = torch.randn(40, requires_grad=True)
    with context:
        x = leaf * 1
        loss = (x * x).sum()
    x.detach().add_(1)
    with pytest.raises(
        RuntimeError, match=r"shape \[40\] .* changed in place .*: expected version 0, received 1; clone"
    ):
        loss.backward()
    # In-place changes of a saved tensor are also detected if the tensor is not offloaded.
    weight = torch.ones(5, requires_grad=True)
    with context:
        loss = (weight * leaf[:5]).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_a_storage_that_was_changed_and_saved_again_is_another(offload_device: str, delay: int) -> None:
    context = offload(offload_device, max_pending=0)
    x = torch.zeros(1000)
    before = context.pack_hook(x)
    context.mark()  # with max_pending=0, mark() waits until the storage of x is copied to the host
    x += 1
    after = context.pack_hook(x)
    del x
    context.mark()
    assert torch.equal(context.unpack_hook(after), torch.ones(1000))
    with pytest.raises(RuntimeError, match="changed in place"):
        context.unpack_hook(before)


def test_several_threads(offload_device: str, delay: int, tmp_path: Path) -> None:
    nets = [model(3) for _ in range(3)]
    inputs = [torch.randn(20, 48, requires_grad=True) for _ in nets]
    for net in nets:
        for block in net:
            block.register_forward_hook(lambda *_: time.sleep(random.random() * 1e-3))

    def step(i: int, context: contextlib.AbstractContextManager) -> list[Tensor]:
        with context:
            loss = nets[i](inputs[i]).square().mean()
        return list(torch.autograd.grad(loss, [inputs[i], nets[i][0].up.weight]))

    for net in nets:
        net.eval()
        for block in net:
            block.forward = lambda x, b=block: x + b.down(torch.relu(b.up(b.norm(x))))
    expected = [step(i, contextlib.nullcontext()) for i in range(3)]
    for options in ({}, {"folder": str(tmp_path), "host_bytes": 1 << 15}):
        store = offload(offload_device, **options)
        failures: list[object] = []

        def work(i: int) -> None:
            try:
                for _ in range(4):
                    hooks = torch.autograd.graph.saved_tensors_hooks(store.pack_hook, store.unpack_hook)
                    assert_same(step(i, hooks), expected[i])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert store.statistics()["entries"] == 0


def test_codes_of_quantised_weights_stay() -> None:
    """A model that is excluded keeps the codes of its quantised weights on the device, which operators save."""
    linear = shoestring.nn.QuantizedLinear(256, 256, bias=False)
    x = torch.randn(8, 256, requires_grad=True)
    offload = shoestring.offload_activations(exclude=linear, device="cpu", min_bytes=0)
    with offload:
        y = linear(linear(x))
    y.sum().backward()
    assert offload.statistics()["stored"] == 0
