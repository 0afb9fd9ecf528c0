# SPDX-License-Identifier: BSD-3-Clause
"""SVGD in plain, differentiable PyTorch: the specification, the fallback and the tests' oracle.

It holds (N, N, dim) tensors, as the libraries of the field do.
"""

import math

import torch


def squared_distances(particles: torch.Tensor) -> torch.Tensor:
    """(N, N), each the sum of squared differences."""
    return (particles[:, None, :] - particles[None, :, :]).square().sum(-1)


def bandwidth(particles: torch.Tensor, rule: str) -> torch.Tensor:
    """h of a rule, a 0-dim tensor; `fused_ops.median_bandwidth` has the rules."""
    count = len(particles)
    distances = squared_distances(particles)
    pairs = distances[tuple(torch.triu_indices(count, count, 1, device=particles.device))]
    if count < 2:
        return particles.new_ones(())
    # The median, as the mean of two middle values, which may be the same.
    if rule == "paper":
        ordered = pairs.sort().values
        middle = (len(ordered) - 1) // 2, len(ordered) // 2
    else:
        ordered = torch.cat([pairs.new_zeros(count), pairs.repeat_interleave(2)]).sort().values
        middle = (len(ordered) - 1) // 2, (len(ordered) - (rule == "median")) // 2
    lower, upper = ordered[middle[0]], ordered[middle[1]]
    median = (lower + upper) / 2
    if rule == "paper":  # ((sqrt(lower) + sqrt(upper)) / 2)^2
        median = (median + _sqrt(lower) * _sqrt(upper)) / 2
    divisor = {
        "median": max(math.log(count), 1.0),
        "paper": 2 * math.log(count),
        "reference": 2 * math.log(count + 1),
    }[rule]
    median = torch.where(pairs.isnan().any(), math.nan, median)
    spread = torch.where(median == 0, pairs.mean(), median)
    return torch.where(spread == 0, torch.ones_like(spread), spread / divisor)


def _sqrt(value: torch.Tensor) -> torch.Tensor:
    """The square root with gradient 0 at 0, where the distance of a pair has none."""
    return torch.where(value == 0, value, torch.where(value == 0, 1, value).sqrt())


def phi(
    particles: torch.Tensor,
    score: torch.Tensor,
    bandwidth: torch.Tensor | float,
    kernel: str,
    repulsion: float,
) -> torch.Tensor:
    """The update direction, (N, dim)."""
    differences = particles[:, None, :] - particles[None, :, :]
    scaled = differences.square().sum(-1) / (2 * bandwidth)
    if kernel == "rbf":
        weight = torch.exp(-scaled)
        gradient = weight / bandwidth
    else:
        weight = (1 + scaled).rsqrt()
        gradient = weight.pow(3) / (2 * bandwidth)
    # No matrix product: torch's TF32 and autocast switches would narrow it.
    terms = weight[:, :, None] * score + repulsion * gradient[:, :, None] * differences
    return terms.sum(1) / len(particles)
