# SPDX-License-Identifier: BSD-3-Clause
"""Particles that are hard on an implementation, by name: cancellation, heavy tails, ties."""

import math
from collections.abc import Callable

import torch


def _clusters(x: torch.Tensor, spread: float, *shares: tuple[float, float]) -> torch.Tensor:
    """Gaussian clusters; of each the share of the particles and the place in all dimensions."""
    ends = torch.tensor([share for share, _ in shares], device=x.device).cumsum(0) * len(x)
    places = torch.tensor([place for _, place in shares], device=x.device, dtype=x.dtype)
    which = torch.bucketize(torch.arange(len(x), device=x.device), ends, right=True)
    return spread * x + places[which.clamp(max=len(shares) - 1), None]


def _heavy_tail(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(x.device).manual_seed(1)
    normal = torch.randn((3, *x.shape), device=x.device, dtype=x.dtype, generator=generator)
    return x / normal.square().mean(0).sqrt()


def _collapsed(x: torch.Tensor) -> torch.Tensor:
    x[len(x) // 5 :] = 1
    return x


# name: from normal particles
PARTICLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gaussian": lambda x: x,
    "shifted by 100": lambda x: x + 100,
    "anisotropic 300:1": lambda x: x * torch.logspace(0, math.log10(300), x.shape[1]).to(x),
    "three clusters": lambda x: _clusters(x, 1, (0.6, 0), (0.2, 3), (0.2, -3)),
    "student t3": _heavy_tail,
    "clusters at 3": lambda x: _clusters(x, 0.3, (0.5, 3), (0.5, -3)),
    "clusters at 10": lambda x: _clusters(x, 0.1, (0.5, 10), (0.5, -10)),
    "scaled 1e-6": lambda x: 1e-6 * x,
    "scaled 1e6": lambda x: 1e6 * x,
    "lattice": lambda x: (2 * x).round(),
    "80 % equal": _collapsed,
    "all equal": lambda x: torch.ones_like(x),
    "two values": lambda x: _clusters(x, 0, (0.5, 1), (0.5, -1)),
}
