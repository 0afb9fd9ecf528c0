# SPDX-License-Identifier: BSD-3-Clause
"""Sample a posterior with particles sharded over processes, one to a GPU or CPU:

    torchrun --nproc-per-node 2 examples/svgd_distributed.py

The posterior is that of Bayesian linear regression, which is normal and known exactly, so the
particles' moments can be checked. Every process owns its particles from the start to the end; only
a step of SVGD lets them see those of the others.
"""

import argparse
import os

import torch
import torch.distributed as dist
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--particles", type=int, default=500, help="of all processes together")
    parser.add_argument("--steps", type=int, default=300)
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

    for _ in range(arguments.steps):
        score = (mean - particles) @ precision
        particles = distributed.svgd_step(particles, score, STEP_SIZE, counts=counts)

    if rank == 0:
        print(f"{arguments.particles} particles on {processes} processes, {device.type}")
    check_moments(particles, mean, covariance)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
