"""Optimizers under the inputs by which PyTorch tests its own, with PyTorch's optimizers as the reference.

The inputs come from ``torch.testing._internal.common_optimizers``, so a newer PyTorch brings newer inputs.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import refused
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal import common_optimizers

import shoestring

OURS: dict[str, Callable[..., Any]] = {
    "AdamW": shoestring.optim.AdamW,
    "SGD": shoestring.optim.SGD,
    "Adafactor": shoestring.optim.Adafactor,
    "Muon": shoestring.optim.Muon,
}
INFOS = {info.optim_cls.__name__: info for info in common_optimizers.optim_db}


def inputs_of(name: str) -> list[dict[str, Any]]:
    """Return the options of each of PyTorch's inputs, and two more that select no implementation.

    SGD has another default momentum here, so its momentum is always given.
    """
    given = [i.kwargs for i in INFOS[name].optim_inputs_func(device="cpu", dtype=torch.float32)]
    if name != "Muon":
        given += [{"foreach": None}, {"foreach": False}]
    return [{"momentum": 0.9 if "foreach" in o else 0.0} | o for o in given] if name == "SGD" else given


CASES = [(name, index) for name in OURS for index in range(len(inputs_of(name)))]
IDS = [
    f"{name}-{'-'.join(f'{k}={v}' for k, v in inputs_of(name)[index].items()) or 'default'}"
    for name, index in CASES
]
cases = pytest.mark.parametrize(("name", "index"), CASES, ids=IDS)


class Pair:
    """The same parameters under an optimizer of PyTorch and under ours."""

    def __init__(self, name: str, options: dict[str, Any], params: list[Tensor], groups: int = 1) -> None:
        self.theirs = [nn.Parameter(p.clone()) for p in params]
        self.ours = [nn.Parameter(p.clone()) for p in params]
        self.peer: Optimizer = INFOS[name].optim_cls(
            self._groups(self.theirs, groups), **copy.deepcopy(options)
        )
        exact = {} if name == "Muon" else {"state_format": "fp32"}
        self.optimizer = OURS[name](self._groups(self.ours, groups), **copy.deepcopy(options), **exact)
        self.tolerance = TOLERANCES[name]

    @staticmethod
    def _groups(params: list[nn.Parameter], groups: int) -> list[dict[str, Any]]:
        return [{"params": params[i::groups]} for i in range(groups) if params[i::groups]]

    def step(self, seed: int, missing: int | None = None, zero: bool = False) -> None:
        random = torch.Generator().manual_seed(seed)
        for i, (a, b) in enumerate(zip(self.theirs, self.ours, strict=True)):
            gradient = torch.zeros(a.shape) if zero else torch.randn(a.shape, generator=random)
            a.grad, b.grad = (
                (None, None) if i == missing else (gradient.to(a.dtype), gradient.to(b.dtype).clone())
            )
        self.peer.step()
        self.optimizer.step()

    def agree(self) -> None:
        for a, b in zip(self.theirs, self.ours, strict=True):
            torch.testing.assert_close(b, a, **self.tolerance)


# Muon's products are bf16 in both. The others differ by the order of a few fp32 roundings per step, which
# AdamW divides by the root of a second moment that may be small in the first steps.
TOLERANCES = {
    "AdamW": dict(rtol=2e-5, atol=1e-6),
    "SGD": dict(rtol=1e-5, atol=1e-6),
    "Adafactor": dict(rtol=2e-5, atol=2e-6),
    "Muon": dict(rtol=2e-2, atol=2e-3),
}


def parameters(name: str) -> list[Tensor]:
    """Return parameters of several shapes; an optimizer of matrices gets matrices."""
    shapes: list[tuple[int, ...]] = [(5, 7), (16, 16), (1, 3)]
    if name != "Muon":
        shapes += [(10,), (), (2, 3, 4), (1,)]
    if name not in ("Muon", "Adafactor"):  # PyTorch's Adafactor makes NaN of an empty matrix
        shapes.append((0, 4))
    return [torch.randn(shape) for shape in shapes]


def options_or_refused(name: str, index: int) -> dict[str, Any]:
    """Return PyTorch's options of a case; skip the test if ours refuses one of them by its name."""
    options = inputs_of(name)[index]
    unsupported = "momentum" if name == "SGD" and not options.get("momentum") else None
    unsupported = "amsgrad" if options.get("amsgrad") else unsupported
    if unsupported:
        with refused(unsupported):
            OURS[name]([nn.Parameter(torch.ones(2, 2))], **options)
    return options


@cases
def test_same_weights(name: str, index: int) -> None:
    pair = Pair(name, options_or_refused(name, index), parameters(name))
    for step in range(12):
        pair.step(step)
        pair.agree()


@cases
def test_groups_with_their_own_rates(name: str, index: int) -> None:
    pair = Pair(name, options_or_refused(name, index), parameters(name), groups=2)
    for step in range(6):
        for optimizer in (pair.peer, pair.optimizer):
            for i, group in enumerate(optimizer.param_groups):
                rate = 0.01 / (1 + i + step)
                group["lr"] = torch.tensor(rate) if isinstance(group["lr"], Tensor) else rate
                group["weight_decay"] = 0.1 * i
        pair.step(step)
    pair.agree()


@cases
def test_gradients_that_are_missing_zero_or_in_other_memory(name: str, index: int) -> None:
    pair = Pair(name, options_or_refused(name, index), parameters(name))
    before = [p.clone() for p in pair.ours]
    pair.optimizer.step()  # no gradient at all
    assert all(torch.equal(a, b) for a, b in zip(before, pair.ours, strict=True))
    for step in range(6):
        pair.step(step, missing=step % 3, zero=step == 4)
        assert all(
            p.grad is None or torch.equal(p.grad, q.grad) for p, q in zip(pair.theirs, pair.ours, strict=True)
        )
    pair.agree()


@cases
def test_strided_parameters(name: str, index: int) -> None:
    wide = [torch.randn(6, 10), torch.randn(8, 4)]
    pair = Pair(name, options_or_refused(name, index), wide)
    for params in (pair.theirs, pair.ours):
        params[0].data = wide[0].clone()[:, ::2]
        params[1].data = wide[1].clone().t()
    for step in range(4):
        pair.step(step)
    pair.agree()


@cases
@pytest.mark.parametrize("way", ["dict", "pickle", "deepcopy", "weights_only", "from_peer"])
def test_resumes(name: str, index: int, way: str) -> None:
    options = options_or_refused(name, index)
    pair = Pair(name, options, parameters(name))
    for step in range(4):
        pair.step(step)
    if way == "deepcopy":
        pair.optimizer, pair.ours = copy.deepcopy((pair.optimizer, pair.ours))
    elif way == "pickle":
        pair.optimizer, pair.ours = pickle.loads(pickle.dumps((pair.optimizer, pair.ours)))
    else:
        state = (pair.peer if way == "from_peer" else pair.optimizer).state_dict()
        if way == "weights_only":
            buffer = io.BytesIO()
            torch.save(state, buffer)
            state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        fresh = Pair(name, options, [p.detach() for p in pair.ours])
        fresh.optimizer.load_state_dict(copy.deepcopy(state))
        pair.optimizer, pair.ours = fresh.optimizer, fresh.ours
    for step in range(4, 8):
        pair.step(step)
    pair.agree()


@pytest.mark.parametrize("name", OURS)
def test_hooks_run_in_the_order_of_pytorch(name: str) -> None:
    pair = Pair(name, {"momentum": 0.9} if name == "SGD" else {}, parameters(name))
    seen: list[list[str]] = [[], []]
    for optimizer, calls in zip((pair.peer, pair.optimizer), seen, strict=True):
        optimizer.register_step_pre_hook(lambda *_, c=calls: c.append("pre"))
        optimizer.register_step_post_hook(lambda *_, c=calls: c.append("post"))
        optimizer.register_state_dict_pre_hook(lambda *_, c=calls: c.append("state pre"))
        optimizer.register_state_dict_post_hook(lambda *_, c=calls: c.append("state post"))
        optimizer.register_load_state_dict_pre_hook(lambda *_, c=calls: c.append("load pre"))
        optimizer.register_load_state_dict_post_hook(lambda *_, c=calls: c.append("load post"))
    pair.step(0)
    for optimizer in (pair.peer, pair.optimizer):
        optimizer.load_state_dict(optimizer.state_dict())
    assert seen[0] == seen[1]
    assert set(seen[0]) == {"pre", "post", "state pre", "state post", "load pre", "load post"}


# ---- wrong inputs ------------------------------------------------------------------------------------------


def errors_of(name: str) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32))


ERRORS = [(name, i) for name in OURS for i in range(len(errors_of(name)))]


@pytest.mark.parametrize(
    ("name", "index"), ERRORS, ids=[f"{n}-{errors_of(n)[i].optimizer_error_input.desc}" for n, i in ERRORS]
)
def test_refuses_what_pytorch_refuses(name: str, index: int) -> None:
    """The same inputs raise the same kind of error; PyTorch's words need not be ours."""
    case = errors_of(name)[index]
    given = case.optimizer_error_input
    options = {"momentum": 0.9} | given.kwargs if name == "SGD" else given.kwargs
    params = [nn.Parameter(torch.ones(2, 2))] if given.params is None else given.params
    if case.error_type is UserWarning:
        with pytest.warns(UserWarning, match=case.error_regex):
            OURS[name](params, **options)
        return
    # A complex parameter is refused here before the first step.
    expected = (ValueError, TypeError, RuntimeError) if "complex" in given.desc else case.error_type
    if options.get("foreach"):  # which is refused whatever the other options are
        expected = (ValueError, TypeError)
    with pytest.raises(expected):
        OURS[name](params, **options).step()


def test_every_family_of_pytorch_was_looked_at() -> None:
    """A new optimizer of PyTorch fails here until somebody has decided whether it has a counterpart."""
    elsewhere = {
        "Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam",
    }  # fmt: skip
    if torch.__version__.startswith("2.11."):
        assert set(INFOS) == set(OURS) | elsewhere
