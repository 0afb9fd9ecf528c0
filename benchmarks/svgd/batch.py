# SPDX-License-Identifier: BSD-3-Clause
"""Many independent problems at once, as in Stein model-predictive control."""

from collections.abc import Callable, Iterator

import torch

import fused_ops
from benchmarks.case import Case
from benchmarks.svgd.cases import SvgdCase, reference_phi

VARIANT = "problems="
SHAPES = [(1000, 64, 8), (1000, 64, 32), (4096, 32, 4), (64, 256, 16)]  # problems, N, dim


class BatchCase(SvgdCase):
    """Its variant tells how many problems."""

    def make_inputs(self) -> None:
        problems = int(self.variant.removeprefix(VARIANT))
        shape = problems, self.count, self.dim
        generator = torch.Generator(self.device).manual_seed(0)
        self.particles, noise = torch.randn((2, *shape), device=self.device, generator=generator)
        self.score = -self.particles + 0.1 * noise

    def implementations(self) -> dict[str, Callable[[], torch.Tensor]]:
        together = torch.vmap(reference_phi)
        functions = {"fused": fused_ops.svgd_phi, "eager": together}
        functions |= {"compile": torch.compile(together), "loop": self.one_by_one}
        return {
            name: lambda function=function: function(self.particles, self.score)
            for name, function in functions.items()
        }

    @staticmethod
    def one_by_one(particles: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        return torch.stack([fused_ops.svgd_phi(*x) for x in zip(particles, score, strict=True)])

    def exact(self) -> list[torch.Tensor]:
        particles, score = self.particles.double(), self.score.double()
        return [torch.vmap(reference_phi, chunk_size=64)(particles, score)]


def cases(device: str, bandwidth: float) -> Iterator[Case]:
    for problems, count, dim in SHAPES if device == "cuda" else SHAPES[:1]:
        yield BatchCase(
            "phi", count, dim, torch.float32, device, bandwidth, variant=f"{VARIANT}{problems}"
        )
