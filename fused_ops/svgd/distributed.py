# SPDX-License-Identifier: BSD-3-Clause
"""SVGD with the particles sharded over processes.

Every process gathers all particles and scores, 8 bytes for each element in float32, and computes
the rows of its own. The pairs of the median are shared among the processes, which add up integer
counts, so the median is that of all particles, exact, and the same everywhere.
"""

from __future__ import annotations  # a torch without distributed has no ProcessGroup

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fused_ops._shards import Shards
from fused_ops._support import accumulate_dtype, check_fallback
from fused_ops.svgd import function, ops, reference


def median_bandwidth(
    particles: torch.Tensor,
    rule: str = "median",
    *,
    group: dist.ProcessGroup | None = None,
    counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """The bandwidth of `fused_ops.median_bandwidth` for particles sharded over processes.

    Args:
        particles: this process's, (N of the process, dim), floating point.
        rule: "median", "paper" or "reference". Default: "median"
        group: the processes. Default: all
        counts: as in `svgd_phi`. Default: None

    Returns:
        A 0-dim tensor, the same in every process.

    Raises:
        TypeError, ValueError: as `fused_ops.median_bandwidth` and `svgd_phi`.

    Source: https://arxiv.org/abs/1608.04471
    """
    function.check_matrix("particles", particles)
    function.check_rule(rule)
    shards = Shards("particles", particles, group, counts)
    return _bandwidth(shards.gather(particles), rule, shards)


def svgd_phi(
    particles: torch.Tensor,
    score: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    counts: Sequence[int] | None = None,
    bandwidth: str | float | torch.Tensor = "median",
    kernel: str = "rbf",
    repulsion: float = 1.0,
    precision: str = "high",
) -> torch.Tensor:
    """`fused_ops.svgd_phi` for particles sharded over processes, of any number each.

    All processes call it together, with the same settings and dtype. Each receives phi of its own
    particles, as one process with all of them would compute it but for rounding, without gradients.

    Args:
        particles: this process's, (N of the process, dim), floating point. N may be zero in some.
        score: of these particles, (N of the process, dim), or a function of them.
        group: the processes, of any backend that takes the particles' device. Default: all
        counts: how many particles each process has, in the order of ranks. By default the
            processes tell each other, for which the host waits; given, nothing waits.
        bandwidth: as in `fused_ops.svgd_phi`; a number or tensor is the same in all processes.
            Default: "median"
        kernel: "rbf" or "imq". Default: "rbf"
        repulsion: factor of the repulsive term. Default: 1.0
        precision: as in `fused_ops.svgd_phi`. Default: "high"

    Returns:
        (N of the process, dim) in the particles' dtype.

    Raises:
        TypeError: as `fused_ops.svgd_phi`.
        ValueError: as `fused_ops.svgd_phi`; an input requires grad; ``counts`` is not one number
            for each process, or not this process's; the processes differ in dim.

    Source: Liu & Wang, "Stein Variational Gradient Descent", NeurIPS 2016,
    https://arxiv.org/abs/1608.04471
    """
    return _update(particles, score, None, group, counts, bandwidth, kernel, repulsion, precision)


def svgd_step(
    particles: torch.Tensor,
    score: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
    step_size: float,
    *,
    group: dist.ProcessGroup | None = None,
    counts: Sequence[int] | None = None,
    bandwidth: str | float | torch.Tensor = "median",
    kernel: str = "rbf",
    repulsion: float = 1.0,
    precision: str = "high",
) -> torch.Tensor:
    """`fused_ops.svgd_step` for particles sharded over processes: ``particles + step_size * phi``.

    The particles are not modified. See `svgd_phi` for the other arguments, the errors and the
    source.

    Args:
        particles: this process's, (N of the process, dim), floating point.
        score: as in `svgd_phi`.
        step_size: a number.
        group: as in `svgd_phi`. Default: all processes
        counts: as in `svgd_phi`. Default: None
        bandwidth: as in `svgd_phi`. Default: "median"
        kernel: "rbf" or "imq". Default: "rbf"
        repulsion: factor of the repulsive term. Default: 1.0
        precision: as in `svgd_phi`. Default: "high"

    Returns:
        The process's new particles, (N of the process, dim) in the dtype of the old.

    Raises:
        TypeError: ``step_size`` is not a number, or as `svgd_phi`.
        ValueError: as `svgd_phi`.
    """
    function.check_number("step_size", step_size)
    return _update(
        particles, score, float(step_size), group, counts, bandwidth, kernel, repulsion, precision
    )


def _bandwidth(particles: torch.Tensor, rule: str, shards: Shards) -> torch.Tensor:
    """Of all particles, in the dtype that kernels accumulate in."""
    x = particles.to(accumulate_dtype(particles.dtype))
    if reasons := function.reasons(particles):
        check_fallback("distributed.median_bandwidth", reasons)
        return reference.bandwidth(x, rule)
    number = function.RULES.index(rule)
    if len(x) == 1 or shards.size == 1:
        return ops.bandwidth(x, number)
    memory, first, last = ops.share_memory(x, shards.size)
    message = None
    for share_pass in range(first, last + 1):
        message = ops.share_pass(x, memory, message, number, share_pass, shards.rank, shards.size)
        dist.all_reduce(message, group=shards.group)
    return ops.share_bandwidth(x, memory, message, number, shards.size)


def _update(
    particles, score, step_size, group, counts, bandwidth, kernel, repulsion, precision
) -> torch.Tensor:
    function.check_matrix("particles", particles)
    score = function.check_update(particles, score, bandwidth, kernel, repulsion, precision)
    if function.needs_grad(particles, score, bandwidth):
        raise ValueError(
            "particles, score and bandwidth: expected tensors that require no grad, since other "
            "processes have part of the result; detach them, or call this under torch.no_grad()"
        )
    shards = Shards("particles", particles, group, counts)
    if sum(shards.counts) * particles.shape[1] == 0:
        return particles.clone()
    everyone = shards.gather(particles)
    scores, gathering = shards.start_gather(score)  # while the median is found
    if isinstance(bandwidth, str):
        bandwidth = _bandwidth(everyone, bandwidth, shards)
    gathering.wait()
    scores = shards.join(scores)
    if len(particles) == 0:
        return particles.clone()
    return function.update_rows(
        "distributed.svgd_phi" if step_size is None else "distributed.svgd_step",
        everyone, scores, step_size, bandwidth, kernel, repulsion, precision,
        shards.first, len(particles),
    )  # fmt: skip
