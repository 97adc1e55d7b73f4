"""Tests of what GaLore and APOLLO share: base optimizer, groups, clipping, state dicts and memory."""

import copy
import io
import pickle

import pytest
import torch
from torch.nn import Parameter

from low_rank import PROJECTED, gradients, parameters, same, train
from shoestring.optim import APOLLO, SGD, AdamW, APOLLOMini, GaLore, Lion

CLASSES = [GaLore, APOLLO, APOLLOMini]
OPTIONS = {
    GaLore: {"rank": 8, "update_proj_gap": 3},
    APOLLO: {"rank": 8, "update_proj_gap": 3},
    APOLLOMini: {"update_proj_gap": 3},
}


def plain(cls: type) -> list[int]:
    """Return the indices of the parameters that `cls` does not project.

    GaLore and APOLLO have rank 8 in the tests, so they do not project the matrix with 4 rows. APOLLOMini has
    rank 1 and projects it.
    """
    return [4, 5] if cls is APOLLOMini else [3, 4, 5]


@pytest.mark.device
@pytest.mark.parametrize(
    ("base", "options"),
    [
        (AdamW, {"state_format": "fp32", "weight_decay": 0.1}),
        (AdamW, {"weight_decay": 0.1}),
        (AdamW, {"min_quantize_size": 300}),
        (AdamW, {"state_format": "4bit"}),
        (AdamW, {"state_format": "bf16"}),
        (Lion, {}),
        (SGD, {"nesterov": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
    ids=[
        "AdamW-fp32",
        "AdamW-8bit",
        "AdamW-some",
        "AdamW-4bit",
        "AdamW-bf16",
        "Lion",
        "SGD",
        "torch.AdamW",
        "torch.SGD",
    ],
)
@pytest.mark.parametrize("cls", CLASSES)
def test_any_base_optimizer(cls: type, base: type, options: dict) -> None:
    """Parameters without a projection step exactly as with the base optimizer alone.

    Projected parameters have the base optimizer's state entries, in the shape of the projected gradient.
    4-bit and bf16 state is rounded stochastically, and the random bits depend on the parameters in the
    optimizer. With such state, steps are compared with a tolerance.
    """
    exact = options.get("state_format") not in ("4bit", "bf16")
    ours, theirs = parameters(), parameters()
    before = [p.detach().clone() for p in ours]
    a, b = cls(ours, base, lr=1e-2, **OPTIONS[cls], **options), base(theirs, lr=1e-2, **options)
    train(a, ours, range(5))
    train(b, theirs, range(5))
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        if i in plain(cls):
            assert a.state[p].keys() == b.state[q].keys()
            assert torch.equal(p, q) if exact else torch.allclose(p, q, rtol=0, atol=0.02)
        else:
            assert p.isfinite().all() and not torch.equal(p, q) and not torch.equal(p, before[i])
            assert b.state[q].keys() <= a.state[p].keys() or "min_quantize_size" in options
    rank = 1 if cls is APOLLOMini else 8
    name = "momentum_buffer" if "SGD" in base.__name__ else "exp_avg"
    if options.get("state_format") == "4bit":  # 4-bit state is stored flat, so there is no shape to check.
        return
    shapes = [tuple(a.state[ours[i]][name].shape) for i in PROJECTED]
    assert shapes == [(rank, 40), (40, rank), (rank, 27), (rank, 48)]


@pytest.mark.device
@pytest.mark.sample(simt=5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cls", CLASSES)
def test_bitwise_resume(cls: type, dtype: torch.dtype) -> None:
    """An optimizer restored from a state dict, a deep copy or a pickle continues with the same bits.

    The copy is made between two projections, and the steps after it include a new projection.
    """
    through = parameters(dtype)
    options = dict(**OPTIONS[cls], lr=1e-2, max_grad_norm=3.0)
    opt = cls(through, AdamW, **options, seed=7)
    train(opt, through, range(5))
    before = [p.detach().clone() for p in through]

    torch.save(opt.state_dict(), file := io.BytesIO())
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed = [Parameter(p.clone()) for p in before]
    # The loaded state dict holds the seeds, so the seed given to the constructor of the resumed optimizer
    # must have no effect.
    other = cls(resumed, AdamW, **options, seed=8)
    other.load_state_dict(saved)
    for p, q in zip(through, resumed, strict=True):
        a, b = opt.state[p], other.state[q]
        assert a.keys() == b.keys()
        assert all(torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items())
    copies = [(o, o.param_groups[0]["params"]) for o in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt)))]

    train(opt, through, range(5, 12))
    train(other, resumed, range(5, 12))
    assert same(through, resumed)
    for again, params in copies:
        train(again, params, range(5, 12))
        assert same(through, params)


@pytest.mark.device
@pytest.mark.parametrize("cls", CLASSES)
def test_results_depend_on_the_seed_alone(cls: type) -> None:
    runs = []
    for seed in (1, 1, 2):
        params = parameters()
        train(cls(params, AdamW, **OPTIONS[cls], seed=seed), params, range(5))
        torch.randn(3)  # Advance PyTorch's global random generator, which must not influence the projections.
        runs.append(params)
    assert same(runs[0], runs[1])
    equal = [torch.equal(p, q) for p, q in zip(runs[0], runs[2], strict=True)]
    assert [i for i, e in enumerate(equal) if e] == plain(cls)
    # Two parameters of equal shape get projections from different seeds.
    a, b = (Parameter(torch.zeros(16, 20)) for _ in range(2))
    opt = cls([a, b], AdamW, **OPTIONS[cls])
    a.grad = b.grad = torch.randn(16, 20)
    opt.step()
    assert opt.state[a]["seed"] != opt.state[b]["seed"]
    if cls is not GaLore:  # GaLore is not compared, since it finds the same singular vectors from any seed.
        assert not torch.equal(a, b)


@pytest.mark.device
@pytest.mark.parametrize("cls", CLASSES)
def test_the_norm_that_clips_is_of_full_gradients(cls: type) -> None:
    """Clipping uses the norm of the gradients before projection, and leaves the gradients unchanged."""
    ours, theirs = parameters(), parameters()
    a = cls(ours, AdamW, **OPTIONS[cls], state_format="fp32", max_grad_norm=2.0, eps=1e-3)
    b = cls(theirs, AdamW, **OPTIONS[cls], state_format="fp32", eps=1e-3)
    for step in range(4):
        gradients(ours, step)
        gradients(theirs, step)
        before = [p.grad.clone() for p in ours]
        norm = torch.nn.utils.clip_grad_norm_(theirs, 2.0)
        a.step()
        b.step()
        assert norm > 20 and a.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, before, strict=True))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


@pytest.mark.device
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)], ids=["number", "tensor"])
@pytest.mark.parametrize("cls", CLASSES)
def test_groups_schedulers_and_late_parameters(cls: type, lr: float | torch.Tensor) -> None:
    rates = [lr.clone() if isinstance(lr, torch.Tensor) else lr for _ in range(2)]
    params, twins = parameters(), parameters()
    opt = cls(
        [{"params": params[:1]}, {"params": params[1:2], "rank": None}], AdamW, **OPTIONS[cls], lr=rates[0]
    )
    dense = AdamW(twins[1:2], lr=rates[1])
    opt.add_param_group({"params": params[2:4], "lr": 0.0, "weight_decay": 0.5})
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch) for o in (opt, dense)]
    still = [p.detach().clone() for p in params]
    for step in range(4):
        gradients(params, step)
        gradients(twins, step)
        params[0].grad = None if step < 2 else params[0].grad
        opt.step()
        dense.step()
        for schedule in schedules:
            schedule.step()
    # params[1] has rank=None and steps as with AdamW. params[2:4] have a learning rate of 0, and the
    # parameters after them are not in the optimizer.
    assert torch.equal(params[1], twins[1])
    assert same(params[2:], still[2:]) and params[4] not in opt.state
    assert [opt.state[p]["step"].item() for p in params[:4]] == [2, 4, 4, 4]
    assert opt.state[params[0]]["projection_age"] == 2 and not torch.equal(params[0], still[0])


@pytest.mark.device
@pytest.mark.parametrize("base", [AdamW, torch.optim.AdamW], ids=["ours", "torch"])
@pytest.mark.parametrize("cls", CLASSES)
def test_grad_scaler_skips_and_unscales(cls: type, base: type) -> None:
    ours, theirs = parameters(), parameters()
    a, b = (cls(p, base, **OPTIONS[cls], max_grad_norm=1.0) for p in (ours, theirs))
    scaler = torch.amp.GradScaler(ours[0].device.type, init_scale=2.0**10, growth_interval=100)
    scaler.scale(torch.ones(1))  # GradScaler creates its scale tensor in the first call of scale().
    for step in range(5):
        gradients(theirs, step)
        gradients(ours, step, scaler.get_scale())
        if step == 2:
            ours[0].grad[0, 0] = torch.inf
        else:
            b.step()
        scaler.step(a)
        scaler.update()
    assert scaler.get_scale() == 2**9 and same(ours, theirs)


@pytest.mark.device
@pytest.mark.parametrize(("kind", "block"), [("8bit", 520), ("bf16", 1024), ("fp32", 2048)])
@pytest.mark.parametrize("cls", CLASSES)
def test_memory_formula(cls: type, kind: str, block: int) -> None:
    for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2)):
        params = [Parameter(torch.zeros(size, dtype=dtype)) for size in ((96, 200), (300, 64))]
        opt = cls(params, AdamW, state_format=kind, **({} if cls is APOLLOMini else {"rank": 24}))
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        tensors = [t for entry in opt.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        rank = 1 if cls is APOLLOMini else 24
        expected = sum(-(-large * rank // 256) * block + 4 for large in (200, 300))
        expected += (96 + 64) * rank * itemsize if cls is GaLore else 2 * 4
        assert sum(storages.values()) == expected
        assert all(v.untyped_storage().nbytes() == 0 and v.grad is None for v in opt._virtual.of.values())
        assert all(p.grad is not None for p in params)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["state"][0].pop("seed"), "seed: expected a whole number, received None"),
        (lambda s: s["state"][0].pop("exp_avg_scale"), "expects the entries"),
        (lambda s: s["state"][0].update(exp_avg=torch.zeros(1, 40)), "exp_avg: expected torch.uint8"),
        (
            lambda s: s["param_groups"][0].update(rank=0),
            "rank: expected None or a whole number of at least 1",
        ),
        (lambda s: s.update(format_version=2), "format_version 1, received AdamW, format_version 2"),
        (lambda s: s["base_optimizer"].update(name="Lion"), "'s over AdamW, format_version 1, received Lion"),
        (lambda s: s.pop("base_optimizer"), "received another optimizer's"),
        (lambda s: s["base_optimizer"].update(format_version=9), "expected format_version"),
    ],
)
def test_a_refused_load_changes_nothing(cls: type, change: object, message: str) -> None:
    params, twins = parameters(), parameters()
    opt, twin = (cls(p, AdamW, **OPTIONS[cls]) for p in (params, twins))
    train(opt, params, range(2))
    train(twin, twins, range(2))
    bad = copy.deepcopy(opt.state_dict())
    change(bad)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(bad)
    assert opt.param_groups[0]["rank"] != 0
    train(opt, params, range(2, 5))
    train(twin, twins, range(2, 5))
    assert same(params, twins)


@pytest.mark.device
@pytest.mark.parametrize("cls", CLASSES)
def test_a_load_copies(cls: type) -> None:
    a, b = parameters(), parameters()
    first, second = (cls(p, AdamW, **OPTIONS[cls]) for p in (a, b))
    train(first, a, range(2))
    second.load_state_dict(first.state_dict())
    kept = copy.deepcopy(second.state_dict()["state"])
    train(first, a, range(2, 7))
    for entry, old in zip(second.state.values(), kept.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(entry[k]), torch.as_tensor(old[k])) for k in old)


def test_closures_hooks_and_compiled_training_steps() -> None:
    layer = torch.nn.Linear(20, 10)
    opt, calls, x = GaLore(layer.parameters(), rank=4, lr=1e-2), [], torch.randn(5, 20)
    opt.register_step_post_hook(lambda *_: calls.append(1))

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        return loss

    @torch.compile(backend="aot_eager")
    def step() -> torch.Tensor:
        loss = closure()
        opt.step()
        return loss

    losses = [opt.step(closure).item() for _ in range(3)] + [step().item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and len(calls) == 6


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "{}: rank: expected None or a whole number of at least 1, received 0"),
        ({"update_proj_gap": 0}, "{}: update_proj_gap: expected a whole number of at least 1, received 0"),
        ({"scale": -1.0}, "{}: scale: expected a number above 0, received -1.0"),
        ({"seed": -1}, "{}: seed: expected a whole number of at least 0, received -1"),
        (
            {"weight_rounding": "stochastic"},
            '{}: weight_rounding: expected "nearest", or rank=None, received .stochastic.',
        ),
        (
            {"step_in_backward": True},
            "{}: step_in_backward: expected an option of AdamW's groups, received True",
        ),
        ({"max_grad_norm": 0}, "{}: max_grad_norm: expected None or a number above 0, received 0"),
        (
            {"base_optimizer": "adamw"},
            "{}: base_optimizer: expected a class of optimizers that do not project",
        ),
        (
            {"base_optimizer": GaLore},
            "{}: base_optimizer: expected a class of optimizers that do not project",
        ),
        (
            {"base_optimizer": SGD, "weight_decay": 0.1},
            "{}: weight_decay: expected 0 with SGD, where it is an L2",
        ),
        ({"base_optimizer": torch.optim.Adam, "weight_decay": 0.1}, "{}: weight_decay: expected 0 with Adam"),
        ({"lr": -1}, "AdamW: lr: expected a number of at least 0, received -1"),
    ],
)
def test_bad_options(cls: type, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.format(cls.__name__)):
        cls(parameters(), **options)


@pytest.mark.parametrize("cls", CLASSES)
def test_bad_parameters_and_gradients(cls: type) -> None:
    p, options = Parameter(torch.zeros(20, 20)), OPTIONS[cls]
    with pytest.raises(TypeError, match="amsgrad"):
        cls([p], AdamW, amsgrad=True)
    with pytest.raises(
        ValueError, match="params\\[0\\]: expected fp32, bf16 or fp16, received torch.float64"
    ):
        cls([Parameter(torch.zeros(20, 20).double())], AdamW, **options)
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        opt = cls([p, p], AdamW, **options)
    assert len(opt.param_groups[0]["params"]) == 1
    opt = cls([p], AdamW, **options)
    with pytest.raises(ValueError, match="lr: expected"):
        opt.add_param_group({"params": [Parameter(torch.zeros(30, 30))], "lr": -1.0})
    assert len(opt.param_groups) == 1
    opt.param_groups[0]["rank"] = 5
    p.grad = torch.ones_like(p)
    with pytest.raises(
        ValueError, match=f"{cls.__name__}: rank: expected the rank that the group was created with"
    ):
        opt.step()
    assert not p.any()
