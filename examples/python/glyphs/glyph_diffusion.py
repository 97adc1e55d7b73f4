"""Train a latent diffusion model of glyphs with uniform and with Min-SNR weights of the timesteps.

    python examples/python/glyphs/glyph_diffusion.py

An autoencoder maps each image to a latent of 4 x 8 x 8 numbers. A class-conditional U-Net then learns to predict
the noise in noisy latents, once with each kind of weights. Both runs have the same first weights, batches,
timesteps and noise.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
from typing import Any

import torch
from glyph_classifier import Run, scaled, train
from glyph_data import CHARACTERS, Glyphs, Parser, add_to_json
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import shoestring
from shoestring.diffusion import min_snr_weights
from shoestring.optim import Averages, schedules

GAMMA, TIMESTEPS, LATENT = 5.0, 1000, (4, 8, 8)
VALIDATED = 768  # held-out glyphs on which the losses are measured
SHOWN = "ABGRSaegkmty2358"  # the characters in the figure


class Autoencoder(nn.Module):
    """A convolutional autoencoder between (rows, 1, 64, 64) and (rows, 4, 8, 8)."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(4),
            *_conv_norm_silu(16, width), *_conv_norm_silu(width, 2 * width, stride=2),
            nn.Conv2d(2 * width, LATENT[0], 3, 1, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            *_conv_norm_silu(LATENT[0], 2 * width), *_conv_norm_silu(2 * width, 4 * width), nn.PixelShuffle(2),
            *_conv_norm_silu(width, width), nn.Conv2d(width, 16, 3, 1, 1), nn.PixelShuffle(4),
        )  # fmt: skip
        # The latents that the diffusion model sees have mean 0 and standard deviation 1.
        self.register_buffer("mean", torch.zeros(LATENT[0], 1, 1))
        self.register_buffer("deviation", torch.ones(LATENT[0], 1, 1))

    def encode(self, images: Tensor) -> Tensor:
        """Return the latents of images between -1 and 1."""
        latents: Tensor = (self.encoder(images) - self.mean) / self.deviation
        return latents

    def decode(self, latents: Tensor) -> Tensor:
        """Return images between -1 and 1."""
        images: Tensor = 2 * self.decoder(latents * self.deviation + self.mean).sigmoid() - 1
        return images


def _conv_norm_silu(width: int, out: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.SiLU()]


def train_autoencoder(glyphs: Glyphs, steps: int, seed: int) -> Autoencoder:
    """Train the autoencoder, then set the scale of its latents."""
    torch.manual_seed(seed)
    model = Autoencoder()
    optimizer = shoestring.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = schedules.Scheduler(optimizer, lr=schedules.one_cycle(steps))
    for _ in range(steps):
        images = scaled(glyphs.images[torch.randint(len(glyphs.labels), (64,))])
        latents = model.encoder(images)
        # Noise and a small penalty keep the latents smooth, as the KL term of a variational autoencoder does.
        logits = model.decoder(latents + 0.1 * torch.randn_like(latents))
        loss = F.binary_cross_entropy_with_logits(logits, images / 2 + 0.5) + 1e-3 * latents.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    latents = latents_of(model, glyphs)
    model.mean.copy_(latents.mean((0, 2, 3)).view(-1, 1, 1))
    model.deviation.copy_(latents.std((0, 2, 3)).view(-1, 1, 1))
    return model


@torch.no_grad()
def latents_of(model: Autoencoder, glyphs: Glyphs) -> Tensor:
    """Return the latents of all glyphs."""
    return torch.cat([model.encode(scaled(images)) for images in glyphs.images.split(256)])


class ConditionedBlock(nn.Module):
    """A residual block whose second norm is scaled and shifted by the condition."""

    def __init__(self, width: int, condition: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))
        self.modulation = nn.Linear(condition, 2 * width)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return a tensor in the shape of x, (rows, width, height, width)."""
        scale, shift = self.modulation(condition)[:, :, None, None].chunk(2, 1)
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y) * (1 + scale) + shift))
        total: Tensor = x + y
        return total


class UNet(nn.Module):
    """A class-conditional U-Net of two resolutions, 8 x 8 and 4 x 4, that predicts the noise."""

    def __init__(self, width: int = 32, condition: int = 128) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, condition), nn.SiLU(), nn.Linear(condition, condition))
        self.label = nn.Embedding(len(CHARACTERS), condition)
        self.first = nn.Conv2d(LATENT[0], width, 3, 1, 1)
        self.down, self.up = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.before, self.middle, self.after = (
            nn.ModuleList(ConditionedBlock(channels, condition) for _ in range(2))
            for channels in (width, 2 * width, width)
        )
        self.merge = nn.Conv2d(2 * width, width, 1)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, LATENT[0], 3, 1, 1)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        """Return the predicted noise, in the shape of the noisy latents x."""
        frequencies = torch.exp(torch.arange(32) * (-math.log(10_000) / 32))
        angles = timesteps[:, None] * frequencies
        condition = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.label(labels))
        x = self.first(x)
        for block in self.before:
            x = block(x, condition)
        y = self.down(x)
        for block in self.middle:
            y = block(y, condition)
        x = self.merge(torch.cat([x, self.up(y)], 1))
        for block in self.after:
            x = block(x, condition)
        noise: Tensor = self.last(F.silu(self.norm(x)))
        return noise


def cosine_alphas() -> Tensor:
    """Return alphas_cumprod of the cosine schedule (arXiv 2102.09672), (1000,) in fp64."""
    t = torch.arange(TIMESTEPS + 1, dtype=torch.float64) / TIMESTEPS
    f = torch.cos((t + 0.008) / 1.008 * math.pi / 2).square()
    return torch.cumprod((f[1:] / f[:-1]).clamp(min=0.001), 0)


def squared_errors(model: nn.Module, latents: Tensor, labels: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """Return the mean squared error of the predicted noise for each row."""
    a = cosine_alphas()[t].float().view(-1, 1, 1, 1)
    predicted = model(a.sqrt() * latents + (1 - a).sqrt() * noise, t, labels)
    errors: Tensor = (predicted - noise).square().flatten(1).mean(1)
    return errors


@torch.no_grad()
def validation_losses(model: nn.Module, latents: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the loss on held-out families with uniform and with Min-SNR weights.

    Timesteps and noise are the same in each call.
    """
    generator = torch.Generator().manual_seed(1)
    t = torch.randint(TIMESTEPS, (len(labels),), generator=generator)
    noise = torch.randn(latents.shape, generator=generator)
    parts = zip(latents.split(256), labels.split(256), t.split(256), noise.split(256), strict=True)
    errors = torch.cat([squared_errors(model, *part) for part in parts])
    weights = min_snr_weights(cosine_alphas(), t, GAMMA)
    return {"uniform": errors.mean().item(), "min_snr": (errors * weights).mean().item()}


@torch.no_grad()
def sample(model: nn.Module, labels: Tensor, steps: int = 25, seed: int = 0) -> Tensor:
    """Sample latents with DDIM (arXiv 2010.02502) without added noise."""
    alphas = cosine_alphas().float()
    x = torch.randn(len(labels), *LATENT, generator=torch.Generator().manual_seed(seed))
    times = torch.linspace(TIMESTEPS - 1, 0, steps).long().tolist()
    for t, following in zip(times, [*times[1:], -1], strict=True):
        a, a_next = alphas[t], alphas[following] if following >= 0 else torch.tensor(1.0)
        noise = model(x, torch.full((len(labels),), t), labels)
        # At the first steps a is nearly 0, so an error of the noise would become a huge latent.
        latents = ((x - (1 - a).sqrt() * noise) / a.sqrt()).clamp(-3, 3)
        noise = (x - a.sqrt() * latents) / (1 - a).sqrt()
        x = a_next.sqrt() * latents + (1 - a_next).sqrt() * noise
    return x


@torch.no_grad()
def readable(model: nn.Module, autoencoder: Autoencoder, reader: nn.Module, per_class: int) -> float:
    """Return the share of sampled glyphs that a classifier reads as the character that was asked for."""
    labels = torch.arange(len(CHARACTERS)).repeat(per_class)
    images = autoencoder.decode(sample(model, labels))
    share: float = (reader(images).argmax(1) == labels).double().mean().item()
    return share


def train_denoiser(
    weighting: str, latents: Tensor, labels: Tensor, steps: int, seed: int, evaluate: Any, every: int
) -> UNet:
    """Train a U-Net, and call ``evaluate(step, model)`` with the averaged weights after each ``every`` steps.

    Args:
        weighting: "uniform" or "min_snr". Nothing else depends on it.
        latents: (glyphs, 4, 8, 8).
        labels: (glyphs,).
        steps: number of steps with 64 rows.
        seed: seed of weights, batches, timesteps and noise.
        evaluate: a function of the step and the model.
        every: number of steps between evaluations.

    Returns:
        The model with the averaged weights.
    """
    torch.manual_seed(seed)
    model, alphas = UNet(), cosine_alphas()
    optimizer = shoestring.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, max_grad_norm=1.0)
    schedule = schedules.Scheduler(optimizer, lr=schedules.constant(warmup=50))
    averages = Averages(model, "ema", decay=0.98)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        rows = torch.randint(len(labels), (64,), generator=generator)
        t = torch.randint(TIMESTEPS, (64,), generator=generator)
        noise = torch.randn(64, *LATENT, generator=generator)
        errors = squared_errors(model, latents[rows], labels[rows], t, noise)
        weights = min_snr_weights(alphas, t, GAMMA) if weighting == "min_snr" else torch.ones(64)
        (errors * weights).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        averages.update()
        if step % every == 0:
            with averages.swap():
                evaluate(step, model)
    averages.copy_to(model)
    return model


def steps_to_reach(runs: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Return for both validation losses the steps that each run takes to the larger one of the last losses.

    Args:
        runs: the curves "steps", "uniform" and "min_snr" of each run.
    """
    found = {}
    for loss in ("uniform", "min_snr"):
        target = max(curves[loss][-1] for curves in runs.values())
        found[loss] = {
            name: _first_step(curves["steps"], curves[loss], target) for name, curves in runs.items()
        }
    return found


def _first_step(steps: list[float], losses: list[float], target: float) -> float:
    """Return the step at which a curve that ends at the target or below first falls to it."""
    points = list(zip(steps, losses, strict=True))
    for (s0, l0), (s1, l1) in itertools.pairwise(points):
        if l1 <= target < l0:
            return s0 + (s1 - s0) * (l0 - target) / (l0 - l1)
    return steps[0]


def grid(images: Tensor) -> str:
    """Return (rows, columns, 64, 64) images between -1 and 1 as one PNG file in base64."""
    rows, columns = images.shape[:2]
    pixels = (images.clamp(-1, 1) * 127.5 + 127.5).to(torch.uint8).permute(0, 2, 1, 3)
    file = io.BytesIO()
    Image.fromarray(pixels.reshape(rows * 64, columns * 64).numpy()).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train autoencoder, reader and both diffusion models, and return the figures."""
    parser = Parser("Trains a latent diffusion model of glyphs, with uniform and with Min-SNR weights.")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each diffusion model")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    training, held_out = parser.glyphs(options)
    if options.quick:
        options.steps = min(options.steps, 40)
    autoencoder = train_autoencoder(training, 10 if options.quick else 500, seed=0)
    reader = train(training, Run(fast=True), steps=2 if options.quick else 300)
    reader.eval()
    latents, unseen = latents_of(autoencoder, training), latents_of(autoencoder, held_out)
    part = torch.randperm(len(unseen), generator=torch.Generator().manual_seed(0))[:VALIDATED]
    every = max(1, options.steps // (4 if options.quick else 20))
    shown = torch.tensor([CHARACTERS.index(character) for character in SHOWN])
    found: dict[str, Any] = {}
    rows = [scaled(held_out.images[held_out.labels == label][0]) for label in shown]
    pictures = [torch.stack(rows)]
    with torch.no_grad():
        pictures.append(autoencoder.decode(autoencoder.encode(pictures[0])))
        reconstruction = torch.cat([autoencoder.decode(latent) for latent in unseen.split(256)])
        read = torch.cat([reader(image).argmax(1) for image in reconstruction.split(256)]) == held_out.labels
    on_reconstructions = read.double().mean().item()
    print(f"the reader reads {on_reconstructions:.3f} of the decoded held-out glyphs", flush=True)
    for weighting in ("uniform", "min_snr"):
        curves: dict[str, list[float]] = {"steps": [], "uniform": [], "min_snr": [], "readable": []}

        def evaluate(step: int, model: nn.Module, curves: dict[str, list[float]] = curves) -> None:
            curves["steps"].append(step)
            for name, loss in validation_losses(model, unseen[part], held_out.labels[part]).items():
                curves[name].append(loss)
            if step % (4 * every) == 0:
                share = readable(model, autoencoder, reader, 1 if options.quick else 3)
                curves["readable"].append(share)

        model = train_denoiser(
            weighting, latents, training.labels, options.steps, options.seed, evaluate, every
        )
        found[weighting] = curves
        with torch.no_grad():
            pictures.append(autoencoder.decode(sample(model, shown)))
        print(
            f"{weighting:8} loss with uniform weights {curves['uniform'][-1]:.4f}, with Min-SNR weights "
            f"{curves['min_snr'][-1]:.4f}, {curves['readable'][-1]:.3f} readable",
            flush=True,
        )
    pictures_png = grid(torch.stack(pictures).squeeze(2))
    steps = steps_to_reach(found)
    results = {
        "reader_on_reconstructions": on_reconstructions,
        "seeds": {str(options.seed): found | {"steps_to_reach": steps, "pictures": pictures_png}},
    }
    if options.json is not None:
        add_to_json(options.json, "diffusion", results)
    return results


if __name__ == "__main__":
    main()
