# SPDX-License-Identifier: BSD-3-Clause
"""The cases of SVGD: the update direction, a step, the median; Gaussian particles."""

import math
from collections.abc import Callable, Iterator

import torch

import fused_ops
from benchmarks.case import Case

CUDA_SHAPES = [
    (100, 2), (256, 64), (1024, 32), (2048, 64), (4096, 64), (8192, 128), (32768, 64), (65536, 32),
]  # fmt: skip
CPU_SHAPES = [(100, 2), (1024, 32), (4096, 64)]
LARGEST_REFERENCE = 2**28  # N * N * dim that the (N, N, dim) tensors of the reference may have
STEP_SIZE = 0.1


def reference_phi(particles: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """As libraries write it: the driving term as a matrix product, which the reference avoids."""
    differences = particles[:, None, :] - particles[None, :, :]
    distances = differences.square().sum(-1)
    bandwidth = distances.flatten().median() / max(math.log(len(particles)), 1.0)
    weight = torch.exp(-distances / (2 * bandwidth))
    repelled = (weight[:, :, None] * differences).sum(1) / bandwidth
    return (weight @ score + repelled) / len(particles)


def reference_step(particles: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    return particles + STEP_SIZE * reference_phi(particles, score)


def reference_median(particles: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    distances = (particles[:, None, :] - particles[None, :, :]).square().sum(-1)
    return distances.flatten().median() / max(math.log(len(particles)), 1.0)


REFERENCES = {"phi": reference_phi, "step": reference_step, "median": reference_median}
FUSED = {
    "phi": fused_ops.svgd_phi,
    "step": lambda particles, score: fused_ops.svgd_step(particles, score, STEP_SIZE),
    "median": lambda particles, score: fused_ops.median_bandwidth(particles),
}


class SvgdCase(Case):
    op = "svgd"

    def make_inputs(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)

        def normal() -> torch.Tensor:
            shape = self.count, self.dim
            return torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator)

        self.particles = normal()
        self.score = -self.particles + 0.1 * normal()

    @property
    def fits_reference(self) -> bool:
        return self.count * self.count * self.dim <= LARGEST_REFERENCE

    def implementations(self) -> dict[str, Callable[[], torch.Tensor]]:
        functions = {"fused": FUSED[self.case]}
        if self.fits_reference:
            functions["eager"] = REFERENCES[self.case]
        if self.fits_reference and self.case == "phi":  # whose parts the others are
            functions["compile"] = torch.compile(reference_phi)
        return {
            name: lambda function=function: function(self.particles, self.score)
            for name, function in functions.items()
        }

    def results(self, call: Callable) -> list[torch.Tensor]:
        return [call()]

    def exact(self) -> list[torch.Tensor]:
        particles, score = self.particles.double(), self.score.double()
        # The float64 kernels compute directly too, in less memory than the reference needs.
        function = REFERENCES[self.case] if self.fits_reference else FUSED[self.case]
        return [function(particles, score)]


def cases(device: str, bandwidth: float) -> Iterator[Case]:
    for shape in CUDA_SHAPES if device == "cuda" else CPU_SHAPES:
        for case in REFERENCES:
            yield SvgdCase(case, *shape, torch.float32, device, bandwidth)
