import math

import pytest
import torch
from torch import Tensor

from shoestring.diffusion import min_snr_weights

pytestmark = pytest.mark.device

PREDICTIONS = ("epsilon", "x0", "v")
ALPHAS = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)


def expected(a: float, gamma: float, prediction: str) -> float:
    """Return the weight by the definition; a is neither 0 nor 1."""
    snr = a / (1 - a)
    return min(snr, gamma) / {"epsilon": snr, "x0": 1.0, "v": snr + 1}[prediction]


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("gamma", [0.5, 5.0, math.inf])
def test_definition(prediction: str, gamma: float) -> None:
    timesteps = torch.arange(1000)
    ours = min_snr_weights(ALPHAS.to(timesteps.device), timesteps, gamma, prediction)
    exact = torch.tensor([expected(float(a), gamma, prediction) for a in ALPHAS], dtype=torch.float64)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=1.2e-7, atol=0)  # one rounding to fp32


def test_the_three_losses_are_one() -> None:
    """Equal errors of x0 give the same loss and the same gradient, whatever the model predicts."""
    timesteps = torch.randint(1000, (64,))
    alphas = ALPHAS.to(timesteps.device)
    a = alphas[timesteps].unsqueeze(1)
    x0, noise = torch.randn(2, 64, 16, dtype=torch.float64)
    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
    guess = (x0 + torch.randn_like(x0)).requires_grad_()  # the model's x0
    guessed_noise = (xt - a.sqrt() * guess) / (1 - a).sqrt()
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        "x0": (guess, x0),
        "epsilon": (guessed_noise, noise),
        "v": (a.sqrt() * guessed_noise - (1 - a).sqrt() * guess, a.sqrt() * noise - (1 - a).sqrt() * x0),
    }
    losses, gradients = [], []
    for prediction, (output, target) in pairs.items():
        weights = min_snr_weights(alphas, timesteps, prediction=prediction)
        losses.append(((output - target).square().mean(1) * weights).mean())
        gradients.append(torch.autograd.grad(losses[-1], guess, retain_graph=True)[0])
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-6, atol=0)


def test_ends_of_the_schedule() -> None:
    """At SNR = 0 and at SNR = infinity the weights are the limits, and finite."""
    timesteps = torch.tensor([0, 1])
    alphas = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for prediction, limits in (("epsilon", [1.0, 0.0]), ("x0", [0.0, 5.0]), ("v", [0.0, 0.0])):
        assert min_snr_weights(alphas, timesteps, prediction=prediction).tolist() == limits


def test_shapes_dtypes_and_strides() -> None:
    timesteps = torch.randint(1000, (4, 6)).t()
    alphas = ALPHAS.to(timesteps.device)
    ours = min_snr_weights(alphas, timesteps)
    assert ours.shape == (6, 4)
    assert torch.equal(ours, min_snr_weights(alphas, timesteps.int()))
    assert torch.equal(ours.flatten(), min_snr_weights(alphas, timesteps.flatten()))
    assert torch.equal(ours, min_snr_weights(alphas.repeat_interleave(2)[::2], timesteps))
    assert min_snr_weights(alphas, timesteps[:0]).shape == (0, 4)
    assert min_snr_weights(alphas, timesteps[0, 0]).shape == ()
    low = alphas.bfloat16()
    assert torch.equal(min_snr_weights(low, timesteps), min_snr_weights(low.double(), timesteps))


def test_compile() -> None:
    alphas, timesteps = ALPHAS.to(torch.ones(1).device), torch.tensor([3, 900])
    compiled = torch.compile(min_snr_weights, fullgraph=True, dynamic=True, backend="aot_eager")
    for prediction in PREDICTIONS:
        assert torch.equal(
            compiled(alphas, timesteps, 5.0, prediction), min_snr_weights(alphas, timesteps, 5.0, prediction)
        )
    torch.library.opcheck(
        torch.ops.shoestring._min_snr_weights.default, (alphas, timesteps, 5.0, "v"), raise_exception=True
    )


def test_errors() -> None:
    alphas, timesteps = torch.tensor([0.9, 0.5]), torch.tensor([1])
    for arguments, message in (
        ((alphas, timesteps, 5.0, "eps"), 'prediction: expected "epsilon", "x0" or "v", received "eps"'),
        ((alphas, timesteps, 0.0), "gamma: expected a number above 0, received 0"),
        ((alphas, timesteps.float()), "timesteps: expected int64 or int32, received Float"),
        ((alphas[None], timesteps), "alphas_cumprod: expected fp64, fp32, bf16 or fp16 of one dimension, r"),
        ((alphas.to("meta"), timesteps), "alphas_cumprod: expected a tensor on the device of timesteps, "),
    ):
        with pytest.raises(ValueError, match="min_snr_weights: " + message.replace("[", r"\[")):
            min_snr_weights(*arguments)


def test_errors_on_the_cpu() -> None:
    timesteps = torch.tensor([1], device="cpu")
    for wrong in (1.5, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"alphas_cumprod: expected values in \[0, 1\]"):
            min_snr_weights(torch.tensor([0.9, wrong], device="cpu"), timesteps)
    with pytest.raises(IndexError):
        min_snr_weights(torch.tensor([0.9], device="cpu"), timesteps)
