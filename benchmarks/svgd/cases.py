# SPDX-License-Identifier: BSD-3-Clause
"""The cases of SVGD: the update direction, a step, the median; Gaussian particles."""

import functools
import math
from collections.abc import Callable, Iterator

import torch

import fused_ops
from benchmarks.case import Case
from benchmarks.svgd import data, seed

CUDA_SHAPES = [
    (100, 2), (256, 64), (1024, 32), (2048, 64), (4096, 64), (8192, 128), (16384, 256), (32768, 64),
    (65536, 32), (65536, 64),
]  # fmt: skip
LARGEST_SHAPES = [(262144, 16), (1_000_000, 3)]
CPU_SHAPES = [(100, 2), (1024, 32), (4096, 64)]
LARGEST_REFERENCE = 2**30  # N * N * dim that the (N, N, dim) tensors of the reference may have
DATA_SHAPE = {"cuda": (4096, 64), "cpu": (1024, 32)}  # of the cases with other particles
LARGEST_MATRIX = 2**30  # N * N of the forms with (N, N) matrices
LEAST_COMPILED = 1024  # particles: below, there is little to win
LARGEST_COMPARISON = 2**28  # N * dim * rows of the differences that `exact` forms
ROWS = 512  # of phi that are compared with float64 where all would take too long
STEP_SIZE = 0.1


def reference_phi(particles: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """As libraries write it: the driving term as a matrix product, which the reference avoids."""
    differences = particles[:, None, :] - particles[None, :, :]
    distances = differences.square().sum(-1)
    bandwidth = distances.flatten().median() / max(math.log(len(particles)), 1.0)
    weight = torch.exp(-distances / (2 * bandwidth))
    repelled = (weight[:, :, None] * differences).sum(1) / bandwidth
    return (weight @ score + repelled) / len(particles)


def matrix_phi(particles: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """The fastest form in PyTorch: products around the mean, no difference of two particles."""
    count = len(particles)
    centred = particles - particles.mean(0)
    norms = centred.square().sum(1)
    distances = (norms[:, None] + norms[None, :] - 2 * centred @ centred.T).clamp(min=0)
    bandwidth = distances.flatten().median() / max(math.log(count), 1.0)
    weight = torch.exp(distances * (-0.5 / bandwidth))
    repelled = weight.sum(1, keepdim=True) * centred / bandwidth
    return (weight @ (score - centred / bandwidth) + repelled) / count


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

        particles, noise = normal(), normal()
        self.score = -particles + 0.1 * noise
        self.particles = data.PARTICLES[self.variant.removeprefix("data=") or "gaussian"](particles)

    @property
    def fits_reference(self) -> bool:
        return self.count * self.count * self.dim <= LARGEST_REFERENCE

    @property
    def rows(self) -> torch.Tensor | slice:
        """What of the results is compared."""
        if self.case == "median" or self.count * self.count * self.dim <= 2**33:
            return slice(None)
        return torch.arange(0, self.count, self.count // ROWS, device=self.device)

    def implementations(self) -> dict[str, Callable[[], torch.Tensor]]:
        functions = {"fused": FUSED[self.case]}
        if self.fits_reference:
            functions["eager"] = REFERENCES[self.case]
        if self.case == "phi":  # whose parts the others are
            if self.count * self.count <= LARGEST_MATRIX:
                functions["matrix"] = matrix_phi
            if not self.variant and self.count >= LEAST_COMPILED:
                functions |= self.more_baselines()
            # Below it makes no difference, and beyond it would take long.
            if self.device == "cuda" and 2048 < self.count <= 65536:
                functions |= {
                    precision: functools.partial(fused_ops.svgd_phi, precision=precision)
                    for precision in ("highest", "medium")
                }
        return {
            name: lambda function=function: function(self.particles, self.score)
            for name, function in functions.items()
        }

    def more_baselines(self) -> dict[str, Callable]:
        functions = {}
        if self.fits_reference:
            functions["compile"] = torch.compile(reference_phi)
        if self.count * self.count <= LARGEST_MATRIX:
            functions["matrix_compile"] = torch.compile(matrix_phi)
        if self.fits_reference and seed.takes(self.particles):
            functions["seed"] = seed.phi
        return functions

    def results(self, call: Callable) -> list[torch.Tensor]:
        return [call()[self.rows] if self.case != "median" else call()]

    def exact(self) -> list[torch.Tensor]:
        particles, score = self.particles.double(), self.score.double()
        if self.fits_reference:
            exact = REFERENCES[self.case](particles, score)
            if exact.isfinite().all():  # the reference divides by the median, which may be zero
                return [exact]
        if isinstance(self.rows, slice):
            # The float64 kernels compute directly too, in less memory than the reference needs.
            return [FUSED[self.case](particles, score)]
        # The float32 bandwidth is exact but for one rounding.
        bandwidth = fused_ops.median_bandwidth(self.particles).double()
        phi = []
        for rows in self.rows.split(max(1, LARGEST_COMPARISON // particles.numel())):
            differences = particles[rows, None] - particles[None]
            weight = torch.exp(differences.square().sum(-1) / (-2 * bandwidth))
            repelled = torch.einsum("ij,ijd->id", weight, differences) / bandwidth
            phi.append((weight @ score + repelled) / self.count)
        if self.case == "step":
            return [particles[self.rows] + STEP_SIZE * torch.cat(phi)]
        return [torch.cat(phi)]


def cases(device: str, bandwidth: float) -> Iterator[Case]:
    for shape in CUDA_SHAPES if device == "cuda" else CPU_SHAPES:
        for case in REFERENCES:
            yield SvgdCase(case, *shape, torch.float32, device, bandwidth)
    for name in data.PARTICLES:
        yield SvgdCase(
            "phi", *DATA_SHAPE[device], torch.float32, device, bandwidth, variant=f"data={name}"
        )
    for shape in LARGEST_SHAPES if device == "cuda" else ():
        yield SvgdCase("phi", *shape, torch.float32, device, bandwidth)
