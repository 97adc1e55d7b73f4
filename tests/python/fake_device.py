"""Run training steps on fake CUDA tensors, without a GPU, and record the operators that they call."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators whose results, or the shapes of whose results, depend on values. The host waits for the device.
SYNCHRONISING = set(
    "_local_scalar_dense item equal is_nonzero nonzero argwhere masked_select _unique _unique2 unique_dim "
    "unique_consecutive bincount repeat_interleave".split()
)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Recorder(TorchDispatchMode):
    """Record every operator, and every reason why it does not run on ``device`` without waiting for it.

    Operators that read and write only empty tensors are not recorded, since they move no data.

    Attributes:
        calls: the name of each operator, with shape and dtype of each tensor that it returns.
        problems: one line for each operator that synchronises, or has a tensor on another device.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.calls: list[tuple[str, list[tuple[tuple[int, ...], torch.dtype]]]] = []
        self.problems: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator.namespace == "prim":  # reads an attribute of a tensor subclass
            return operator(*args, **kwargs)
        name = operator.__name__.split(".")[0]
        if name in SYNCHRONISING:
            self.problems.append(f"{operator} synchronises")
        if name in ("index", "index_put", "index_put_") and any(
            index.dtype == torch.bool for index in _tensors(args[1])
        ):
            self.problems.append(f"{operator} synchronises: it counts the true elements of a mask")
        result = operator(*args, **kwargs)
        made = _tensors(result)
        touched = [t for t in (*_tensors((args, kwargs)), *made) if t.numel()]
        if touched or not made:
            self.calls.append((str(operator), [(tuple(t.shape), t.dtype) for t in made]))
        if elsewhere := {str(t.device) for t in touched if t.device.type != self.device}:
            self.problems.append(f"{operator}: expected {self.device}, received {', '.join(elsewhere)}")
        return result


def run_backward(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor],
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> tuple[Tensor | None, ...]:
    """Call the nodes of an autograd graph in the order of PyTorch's engine, which needs a real GPU.

    The arguments are those of ``torch.autograd.graph._engine_run_backward``. Hooks of tensors and nodes do not
    run, except post-accumulate-grad hooks. The graph is always kept, and second derivatives are not recorded.
    """
    assert not (create_graph or (inputs and accumulate_grad))
    wanted: dict[Node, list[tuple[int, int]]] = {}  # by node: (index of its gradient, index in `inputs`)
    for i, t in enumerate(inputs):
        edge = get_gradient_edge(t)
        wanted.setdefault(edge.node, []).append((edge.output_nr, i))
    found: list[Tensor | None] = [None] * len(inputs)

    buffers: dict[Node, list[Tensor | None]] = {}

    def add(node: Node, index: int, grad: Tensor) -> None:
        buffer = buffers.setdefault(node, [None] * len(node._input_metadata))
        before = buffer[index]
        buffer[index] = grad if before is None else before + grad

    edges = [get_gradient_edge(t) for t in outputs]
    uses: dict[Node, int] = {edge.node: 0 for edge in edges}
    unseen = list(uses)
    while unseen:
        for node, _ in unseen.pop().next_functions:
            if node is not None and node not in uses:
                uses[node] = 0
                unseen.append(node)
            if node is not None:
                uses[node] += 1
    for edge, t, grad in zip(edges, outputs, grads):
        add(edge.node, edge.output_nr, torch.ones_like(t) if grad is None else grad)

    order = count()
    # Like the engine, first accumulate gradients into leaves, then call the node that was created last.
    ready: list[tuple[int, int, Node]] = []

    def push(node: Node) -> None:
        is_leaf = node.name() == "torch::autograd::AccumulateGrad"
        heapq.heappush(ready, (-(1 << 62) if is_leaf else -node._sequence_nr(), next(order), node))

    for node in dict.fromkeys(edge.node for edge in edges):
        if uses[node] == 0:
            push(node)
    with torch.no_grad():
        while ready:
            node = heapq.heappop(ready)[2]
            own = buffers.pop(node, None)
            for which, i in wanted.get(node, []):
                found[i] = own[which] if own else None
            made: Any = ()
            is_leaf = node.name() == "torch::autograd::AccumulateGrad"
            if own and not (is_leaf and not accumulate_grad):
                made = node.apply(*own) if hasattr(node, "apply") else node(*own)
                made = made if isinstance(made, tuple) else (made,)
            for i, (following, index) in enumerate(node.next_functions):
                if following is None:
                    continue
                if i < len(made) and made[i] is not None:
                    add(following, index, made[i])
                uses[following] -= 1
                if uses[following] == 0:
                    push(following)
    return tuple(found)


@pytest.fixture
def walked_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run backward passes through ``run_backward`` instead of PyTorch's engine."""
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run_backward)


@contextmanager
def fake_cuda(*models: nn.Module) -> Iterator[FakeTensorMode]:
    """Move models to a fake CUDA device, and enter its FakeTensorMode.

    An operator without an implementation for the dispatch key Meta raises an error.
    """
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    try:
        with mode:
            for model in models:
                model.to("cuda")
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    mode.allow_non_fake_inputs = False
    with mode:
        yield mode
