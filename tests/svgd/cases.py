# SPDX-License-Identifier: BSD-3-Clause
"""Inputs, and the comparison with float64, for the tests of SVGD."""

import math

import torch
from comparison import assert_same_bits as assert_same_bits
from comparison import recorded_ops as recorded_ops

from fused_ops.svgd.function import KERNELS, RULES

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
RULE_NUMBERS = {rule: number for number, rule in enumerate(RULES)}  # as the ops take them
KERNEL_NUMBERS = {kernel: number for number, kernel in enumerate(KERNELS)}

update_op = torch.ops.fused_ops.svgd_update.default
bandwidth_op = torch.ops.fused_ops.svgd_bandwidth.default
distances_op = torch.ops.fused_ops.svgd_distances.default

# Error of phi as a part of its norm: in float32 what the kernels promise whatever N and dim; in
# float64 what the oracle's own products lose, with room for N and dim in the thousands.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12}


def random_tensor(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def random_inputs(count, dim, dtype=torch.float32, device="cpu", seed=0):
    """Particles, and a score that is no function of them."""
    return [
        random_tensor(count, dim, dtype=dtype, device=device, seed=2 * seed + i) for i in range(2)
    ]


def bandwidth_by_sorting(distances, rule):
    """h of an (N, N) matrix of squared distances, by sorting all that the rule's median is over.

    From the middle distances on it is float64, rounded once.
    """
    count = len(distances)
    pairs = distances[torch.ones_like(distances, dtype=torch.bool).triu(1)]
    if count < 2:
        return distances.new_ones(())
    values = (pairs if rule == "paper" else distances.flatten()).sort().values
    lower = values[(len(values) - 1) // 2].item()
    upper = lower if rule == "median" else values[len(values) // 2].item()
    if rule == "paper" and lower != upper:
        median = ((math.sqrt(lower) + math.sqrt(upper)) / 2) ** 2
    else:
        median = lower / 2 + upper / 2
    if median == 0:
        median = pairs.double().mean().item()
    if median == 0:
        return distances.new_ones(())
    divisor = {
        "median": max(math.log(count), 1),
        "paper": 2 * math.log(count),
        "reference": 2 * math.log(count + 1),
    }[rule]
    return distances.new_tensor(median / divisor)


def exact_distances(particles, others=None):
    """Squared distances in float64, from differences, without an (N, N, dim) tensor."""
    x = particles.double()
    y = x if others is None else others.double()
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()


def exact_phi(particles, score, *, bandwidth="median", kernel="rbf", repulsion=1.0, rows=None):
    """phi in float64, at `rows` or everywhere, from (N, N) tensors and matrix products.

    test_values.py compares it with the reference and with the definition.
    """
    # Products of G with x cancel away from the origin.
    x = particles.double() - particles.double().mean(0)
    wanted = x if rows is None else x[rows]
    distances = exact_distances(wanted, x)
    h = bandwidth_by_sorting(distances, bandwidth) if isinstance(bandwidth, str) else bandwidth
    u = distances / (2 * h)
    if kernel == "rbf":
        weight = torch.exp(-u)
        gradient = weight / h
    else:
        weight = (1 + u) ** -0.5
        gradient = weight**3 / (2 * h)
    repelled = gradient.sum(1, keepdim=True) * wanted - gradient @ x
    return (weight @ score.double() + repulsion * repelled) / len(x)


def error_of_norm(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


def check_phi(phi, particles, score, **settings):
    """Compares phi with float64, as parts of the norm."""
    error = error_of_norm(phi, exact_phi(particles, score, **settings))
    assert error <= TOLERANCES[phi.dtype], error
