# SPDX-License-Identifier: BSD-3-Clause
"""The kernelised Stein discrepancy, from sums that the fused update forms."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import pad

from fused_ops._support import Dispatch, accumulate_dtype, explain, explains
from fused_ops.svgd.function import (
    check_matrix,
    check_update,
    median_bandwidth,
    svgd_phi,
    update_rows,
)

STATISTICS = ("u", "v")


def ksd(
    particles: torch.Tensor,
    score: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
    *,
    bandwidth: str | float | torch.Tensor = "median",
    kernel: str = "rbf",
    statistic: str = "u",
) -> torch.Tensor:
    r"""The squared kernelised Stein discrepancy between the particles and a density.

    .. math::
        u_{ij} = K_{ij}\, score_i \cdot score_j + score_i \cdot \nabla_{x_j} K_{ij}
                 + score_j \cdot \nabla_{x_i} K_{ij} + \nabla_{x_i} \cdot \nabla_{x_j} K_{ij}

    with the kernels of `svgd_phi`. "u" is the mean of u over the pairs i != j: unbiased, around
    zero for independent draws from the density, and often negative for particles of SVGD, which
    space themselves out. "v" is the mean over all i, j, never negative: the squared norm of the
    direction that SVGD takes. Neither is the root, which some authors call the discrepancy.

    Memory is O(N * dim). "rbf" takes two fused updates, as
    :math:`\nabla_{x_i} \cdot \nabla_{x_j} K = K (dim / h - |x_i - x_j|^2 / h^2)` sums up to inner
    products of their results. "imq" takes one; its trace has a sum of :math:`K^5` that no update
    forms, so PyTorch goes through the distances in blocks of rows.

    The terms cancel where the particles fit: in float32 a result errs by up to some 1e-7 of the
    mean of u_ii, which is :math:`|score_i|^2 + dim / h` ("rbf") or :math:`|score_i|^2 + dim / 2h`
    ("imq"). On CUDA sums are formed as with ``precision="highest"``. Inputs that require grad run
    in the differentiable reference.

    Args:
        particles: (N, dim), floating point. float16 and bfloat16 are accumulated in float32.
        score: the gradient of the log density at each particle, (N, dim) in the particles' dtype,
            or a function that is called once with the detached particles and returns it.
        bandwidth: h: the name of a rule (see `median_bandwidth`), a positive number, or a 0-dim
            tensor on the particles' device, which is not read on the host. Default: "median"
        kernel: "rbf" or "imq". Default: "rbf"
        statistic: "u" or "v". Default: "u"

    Returns:
        A 0-dim tensor on the particles' device, which nothing waits for: float64 for float64, else
        float32.

    Raises:
        TypeError, ValueError: as `svgd_phi`.
        ValueError: an unknown statistic; fewer than 2 particles for "u", none for "v".
        FallbackError: the kernels do not take the call and ``set_fallback("error")`` is in force.

    Source: Liu, Lee & Jordan, "A Kernelized Stein Discrepancy for Goodness-of-fit Tests", ICML
    2016, https://arxiv.org/abs/1602.03253; Chwialkowski, Strathmann & Gretton, "A Kernel Test of
    Goodness of Fit", ICML 2016, https://arxiv.org/abs/1602.02964
    """
    _check_statistic(particles, statistic)
    score = check_update(particles, score, bandwidth, kernel, 1.0, "highest")
    count, dim = particles.shape
    dtype = accumulate_dtype(particles.dtype)
    h = median_bandwidth(particles, bandwidth) if isinstance(bandwidth, str) else bandwidth
    x, s = particles.to(dtype), score.to(dtype)
    if isinstance(h, torch.Tensor):
        h = h.to(dtype)

    # Sums over i and j, each over N. The two terms with one gradient are equal, as K is symmetric.
    if kernel == "rbf":
        # Columns in which all particles agree and score is 1 hold the sums of K; whole groups of
        # four keep rows aligned.
        extra = 4 - dim % 4
        phi = _phi(pad(x, (0, extra)), pad(s, (0, extra), value=1.0), h, kernel, 2.0)
        repulsion = _phi(x, torch.zeros_like(s), h, kernel, 1.0)  # sum of K (x_i - x_j) / (N h)
        trace = dim / h * phi[:, -1].sum() - 2 / h * ((x - x.mean(0)) * repulsion).sum()
        own_trace = dim / h
        phi = phi[:, :dim]
    else:
        phi = _phi(x, s, h, kernel, 2.0)
        trace = _imq_trace(x, h)
        own_trace = dim / (2 * h)
    total = (s * phi).sum() + trace
    if statistic == "v":
        return total / count
    return (total - s.square().sum() / count - own_trace) / (count - 1)


def _check_statistic(particles, statistic) -> None:
    check_matrix("particles", particles)
    if statistic not in STATISTICS:
        raise ValueError(f"statistic: expected one of {', '.join(STATISTICS)}, got {statistic!r}")
    count = len(particles)
    if count < (least := 2 if statistic == "u" else 1):
        raise ValueError(f'particles: expected at least {least} for "{statistic}", got {count}')


def _phi(particles, score, h, kernel, repulsion) -> torch.Tensor:
    return update_rows("ksd", particles, score, None, h, kernel, repulsion, "highest", 0, None)


def _imq_trace(x: torch.Tensor, h: torch.Tensor | float) -> torch.Tensor:
    """The sum of K^3 (dim - 3 + 3 K^2) / 2h over i and j, over N."""
    count, dim = x.shape
    total = x.new_zeros(())
    for rows in x.split(max(dim, 64)):  # O(N * dim); at least 64, for speed in few dimensions
        distances = torch.cdist(rows, x, compute_mode="donot_use_mm_for_euclid_dist").square()
        squared = 1 / (1 + distances / (2 * h))  # K^2
        total = total + (squared * squared.sqrt() * (dim - 3 + 3 * squared)).sum()
    return total / (2 * h) / count


@explains(ksd)
def _(particles, score, *, bandwidth="median", kernel="rbf", statistic="u") -> Dispatch:
    _check_statistic(particles, statistic)
    update = explain(
        svgd_phi, particles, score, bandwidth=bandwidth, kernel=kernel, precision="highest"
    )
    if update.path == "fused" and kernel == "imq":
        update.details["trace"] = "pytorch, in blocks of rows"
    return replace(update, op="ksd")
