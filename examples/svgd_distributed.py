# SPDX-License-Identifier: BSD-3-Clause
"""Sample a posterior with particles sharded over processes, one to a GPU or CPU:

    torchrun --nproc-per-node 2 examples/svgd_distributed.py

The posterior is that of Bayesian linear regression, which is normal and known exactly, so the
particles' moments can be checked. Every process owns its particles from the start to the end; only
a step of SVGD lets them see those of the others. The picture shows whose are where.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from svgd_distributed_picture import draw
from torch import Tensor

from fused_ops import distributed

SEED = 0
ROWS, DIM = 200, 8
NOISE = 4.0  # deviation of the observations
STEP_SIZE = 0.3
# Of the mean, in posterior deviations; of the covariance, relative. SVGD of N particles in 8
# dimensions leaves the deviations a little small.
MEAN_TOLERANCE, COVARIANCE_TOLERANCE = 0.05, 0.25


def posterior(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean [DIM] and precision [DIM, DIM] of the weights, given the data and a normal prior."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(ROWS, DIM, generator=generator)
    inputs[:, 1::2] = 0.8 * inputs[:, ::2] + 0.6 * inputs[:, 1::2]  # so that weights depend too
    weights = torch.randn(DIM, generator=generator)
    outputs = inputs @ weights + NOISE * torch.randn(ROWS, generator=generator)
    precision = torch.eye(DIM) + inputs.T @ inputs / NOISE**2
    mean = torch.linalg.solve(precision, inputs.T @ outputs / NOISE**2)
    return mean.to(device), precision.to(device)


def check_moments(particles: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Raise if the particles of all processes have not the posterior's moments."""
    sums = torch.stack([particles.sum(0), particles.new_full((DIM,), len(particles))])
    dist.all_reduce(sums)
    found_mean = sums[0] / sums[1]
    products = (particles - found_mean).T @ (particles - found_mean)
    dist.all_reduce(products)
    mean_error = ((found_mean - mean).abs() / covariance.diagonal().sqrt()).max().item()
    found = products / sums[1]
    covariance_error = ((found - covariance).norm() / covariance.norm()).item()
    if dist.get_rank() == 0:
        print(f"mean off by {mean_error:.3f} deviations, covariance by {covariance_error:.0%}")
    if not (mean_error <= MEAN_TOLERANCE and covariance_error <= COVARIANCE_TOLERANCE):
        raise RuntimeError("the particles do not have the posterior's moments")


def gather(particles: Tensor) -> list[np.ndarray] | None:
    """Those of every process, [count, DIM] each, on rank 0; None elsewhere."""
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(particles.cpu().numpy(), parts)
    return parts


def dependent_pair(covariance: Tensor) -> list[int]:
    """The two dimensions whose correlation is largest."""
    deviations = covariance.diagonal().sqrt()
    correlation = (covariance / deviations.outer(deviations)).abs().fill_diagonal_(0)
    return list(divmod(correlation.argmax().item(), DIM))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--particles", type=int, default=500, help="of all processes together")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu", int(os.environ["LOCAL_RANK"]) * on_gpu)
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()

    # Known to all, so that no step has to ask how many particles the others have.
    counts = [len(part) for part in torch.arange(arguments.particles).tensor_split(processes)]
    generator = torch.Generator().manual_seed(SEED + rank)
    particles = torch.randn(counts[rank], DIM, generator=generator).to(device)
    mean, precision = posterior(device)
    covariance = precision.inverse()

    first = gather(particles)
    for _ in range(arguments.steps):
        score = (mean - particles) @ precision
        particles = distributed.svgd_step(particles, score, STEP_SIZE, counts=counts)

    if rank == 0:
        print(f"{arguments.particles} particles on {processes} processes, {device.type}")
    check_moments(particles, mean, covariance)
    last = gather(particles)
    if rank == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        picture = arguments.output / "svgd_distributed.png"
        pair = dependent_pair(covariance)
        draw(
            picture,
            {"Start": first, f"After {arguments.steps} steps": last},
            mean.cpu().numpy(),
            covariance.cpu().numpy(),
            pair,
        )
        print(f"written: {picture}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
