# SPDX-License-Identifier: BSD-3-Clause
"""The public functions."""

import math
import numbers
import sys
from collections.abc import Callable

import torch

from fused_ops._library import native
from fused_ops._support import (
    Dispatch,
    accumulate_dtype,
    check_fallback,
    check_floating,
    explains,
    name_of,
    tensor_reasons,
)
from fused_ops.svgd import ops, reference

RULES = ("median", "paper", "reference")
KERNELS = ("rbf", "imq")
PRECISIONS = ("highest", "high", "medium")
assert native is None or (RULES, KERNELS, PRECISIONS) == (
    native.BANDWIDTH_RULES,
    native.STEIN_KERNELS,
    native.PRECISIONS,
)


def median_bandwidth(particles: torch.Tensor, rule: str = "median") -> torch.Tensor:
    r"""The bandwidth h of a median rule, exact and without waiting for the device.

    ============= ============================================ ============================ =====
    rule          h                                            median over                  even
    ============= ============================================ ============================ =====
    "median"      :math:`\mathrm{med}(d^2) / \max(\log N, 1)`  all N*N, zeros included      lower
    "paper"       :math:`\mathrm{med}(d)^2 / (2 \log N)`       pairs i < j                  mean
    "reference"   :math:`\mathrm{med}(d^2) / (2 \log(N + 1))`  all N*N, zeros included      mean
    ============= ============================================ ============================ =====

    "paper" is Liu & Wang's and that of NumPyro and BlackJAX, "reference" that of the authors' code
    and PyMC. Where the median is zero, the mean of d^2 over the pairs i < j takes its place; where
    that is zero too, or N is 1, h is 1. A NaN distance gives NaN.

    Args:
        particles: (..., N, dim), floating point; leading dimensions are independent problems.
        rule: "median", "paper" or "reference". Default: "median"

    Returns:
        A tensor (...), 0-dim for particles (N, dim), on the particles' device: float64 for
        float64, else float32.

    Raises:
        TypeError: ``particles`` is not a floating-point tensor.
        ValueError: ``particles`` has fewer than two dimensions, or the rule is unknown.
        FallbackError: the kernels do not take the call and ``set_fallback("error")`` is in force.

    Source: https://arxiv.org/abs/1608.04471
    """
    _check_matrices("particles", particles)
    check_rule(rule)
    if why := reasons(particles):
        check_fallback("median_bandwidth", why)
        return _for_each_problem(
            lambda problem: reference.bandwidth(_accumulated(problem), rule), particles
        )
    bandwidths = ops.bandwidth(_as_problems(particles), RULES.index(rule))
    return bandwidths.view(particles.shape[:-2])


def svgd_phi(
    particles: torch.Tensor,
    score: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
    *,
    bandwidth: str | float | torch.Tensor = "median",
    kernel: str = "rbf",
    repulsion: float = 1.0,
    precision: str = "high",
) -> torch.Tensor:
    r"""The update direction of Stein variational gradient descent, fused.

    .. math::
        \phi_i = \frac{1}{N} \sum_j \left[ K_{ij}\, score_j
                 + repulsion \cdot \nabla_{x_j} K_{ij} \right]

    with :math:`K_{ij} = \exp(-|x_i - x_j|^2 / 2h)` ("rbf") or
    :math:`(1 + |x_i - x_j|^2 / 2h)^{-1/2}` ("imq"). No (N, N, dim) tensor is formed and, above a
    few thousand particles, no (N, N) tensor either. Leading dimensions are independent problems,
    which on CUDA take one launch if they are small: up to 256 particles that fit into a block's
    shared memory.

    With the default ``repulsion=1.0`` particles push each other apart, as in the paper.
    ``repulsion=-1.0`` flips that term and so gives the values of the KernelBench-style entry
    ``SteinVariationalGradient``, whose reference attracts.

    Results are bitwise the same from run to run. Inputs that require grad, where gradients are
    enabled, run in the differentiable reference. With an optimiser, keep the particles out of
    autograd: ``particles.grad = -svgd_phi(particles, score)`` before each step of
    ``torch.optim.Adam([particles])`` runs fused.

    Args:
        particles: (..., N, dim), floating point. float16 and bfloat16 are accumulated in float32.
        score: the gradient of the log density at each particle, in the particles' shape and dtype,
            or a function that is called once with the detached particles and returns it.
        bandwidth: h: the name of a rule (see `median_bandwidth`), a positive number, or a tensor on
            the particles' device, 0-dim or of the leading dimensions' shape, which is not read on
            the host. Default: "median"
        kernel: "rbf" or "imq". Default: "rbf"
        repulsion: factor of the repulsive term. Default: 1.0
        precision: how float32 sums over the particles are formed on CUDA, in the terms of
            :func:`torch.set_float32_matmul_precision`. "highest" takes direct differences. "high"
            multiplies around the mean with 22 bits on tensor cores, and takes direct differences
            where the data would make its error of phi more than about 2e-5 of phi's norm; of more
            than 2048 particles it does so on compute capability 9.0 for "rbf" in 16 to 256
            dimensions, elsewhere it is "highest". "medium" is that with fewer terms above 2048
            particles, at an error up to 1e-3. The median is exact in all of them. Default: "high"

    Returns:
        (..., N, dim) in the particles' dtype.

    Raises:
        TypeError: a tensor is not floating point, or particles and score differ in dtype.
        ValueError: particles and score differ in shape or device, or have fewer than two
            dimensions; a bandwidth that is no positive number, no known rule or of another shape;
            an unknown kernel or precision.
        FallbackError: the kernels do not take the call and ``set_fallback("error")`` is in force.

    Source: Liu & Wang, "Stein Variational Gradient Descent", NeurIPS 2016,
    https://arxiv.org/abs/1608.04471
    """
    return _update("svgd_phi", particles, score, None, bandwidth, kernel, repulsion, precision)


def svgd_step(
    particles: torch.Tensor,
    score: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
    step_size: float,
    *,
    bandwidth: str | float | torch.Tensor = "median",
    kernel: str = "rbf",
    repulsion: float = 1.0,
    precision: str = "high",
) -> torch.Tensor:
    """One step of Stein variational gradient descent, ``particles + step_size * phi``, fused.

    The particles are not modified. See `svgd_phi` for the other arguments, the errors and the
    source.

    Args:
        particles: (..., N, dim), floating point.
        score: as in `svgd_phi`.
        step_size: a number.
        bandwidth: as in `svgd_phi`. Default: "median"
        kernel: "rbf" or "imq". Default: "rbf"
        repulsion: factor of the repulsive term. Default: 1.0
        precision: as in `svgd_phi`. Default: "high"

    Returns:
        The new particles, (..., N, dim) in the dtype of the old.

    Raises:
        TypeError: ``step_size`` is not a number, or as `svgd_phi`.
        ValueError: as `svgd_phi`.
        FallbackError: as `svgd_phi`.
    """
    check_number("step_size", step_size)
    step_size = float(step_size)
    return _update(
        "svgd_step", particles, score, step_size, bandwidth, kernel, repulsion, precision
    )


def _update(
    op, particles, score, step_size, bandwidth, kernel, repulsion, precision
) -> torch.Tensor:
    score = check_update(particles, score, bandwidth, kernel, repulsion, precision)
    return update_rows(
        op, particles, score, step_size, bandwidth, kernel, repulsion, precision, 0, None
    )


def check_update(particles, score, bandwidth, kernel, repulsion, precision) -> torch.Tensor:
    """Checks the arguments of an update, and returns the score."""
    _check_matrices("particles", particles)
    if callable(score) and not isinstance(score, torch.Tensor):
        score = score(particles.detach())
    _check_like_particles("score", score, particles)
    _check_bandwidth(bandwidth, particles)
    if kernel not in KERNELS:
        raise ValueError(f"kernel: expected one of {', '.join(KERNELS)}, got {kernel!r}")
    check_number("repulsion", repulsion)
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    return score


def update_rows(
    op, particles, score, step_size, bandwidth, kernel, repulsion, precision, first_row, rows
) -> torch.Tensor:
    """The update of `rows` particles from `first_row` on, by default all that are left. Arguments
    as `check_update` lets them pass."""
    if why := reasons(particles, score, bandwidth):
        check_fallback(op, why)
        result = _fallback(particles, score, step_size, bandwidth, kernel, repulsion)
        return result if rows is None else result[first_row : first_row + rows]
    rule, number, tensor = -1, 0.0, None
    if isinstance(bandwidth, str):
        rule = RULES.index(bandwidth)
    elif isinstance(bandwidth, torch.Tensor):
        tensor = bandwidth.to(accumulate_dtype(particles.dtype)).expand(particles.shape[:-2])
        tensor = tensor.contiguous()
    else:
        number = float(bandwidth)
    result = ops.update(
        _as_problems(particles), _as_problems(score), tensor, rule, number, KERNELS.index(kernel),
        float(repulsion), step_size, PRECISIONS.index(precision), -1, first_row, rows,
    )  # fmt: skip
    return result if particles.dim() < 4 else result.view(particles.shape)


def reasons(particles, score=None, bandwidth=None) -> list[str]:
    """Why the kernels do not take a call; empty where they do."""
    found = tensor_reasons(*(x for x in (particles, score) if x is not None))
    if isinstance(bandwidth, torch.Tensor):
        # By itself, for it may have another floating-point dtype: it is converted.
        found = found or tensor_reasons(bandwidth)
    if not found and particles.numel() == 0:
        found.append("no particles or no dimensions")
    if needs_grad(particles, score, bandwidth):
        found.append("an input requires grad")
    return found


def needs_grad(*inputs) -> bool:
    """Whether autograd would want the gradient of one of them, tensors or not."""
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in inputs
    )


def _fallback(particles, score, step_size, bandwidth, kernel, repulsion) -> torch.Tensor:
    if particles.numel() == 0:
        return particles.clone()

    def update(particles, score, bandwidth=bandwidth):
        x, s = _accumulated(particles), _accumulated(score)
        h = reference.bandwidth(x, bandwidth) if isinstance(bandwidth, str) else bandwidth
        phi = reference.phi(x, s, h, kernel, repulsion)
        result = phi if step_size is None else x + step_size * phi
        return result.to(particles.dtype)

    if isinstance(bandwidth, torch.Tensor):
        bandwidths = bandwidth.expand(particles.shape[:-2])
        return _for_each_problem(update, particles, score, bandwidths)
    return _for_each_problem(update, particles, score)


def _as_problems(tensor: torch.Tensor) -> torch.Tensor:
    """(..., N, dim) as the ops take it: (N, dim) or (problems, N, dim)."""
    return tensor if tensor.dim() < 4 else tensor.reshape(-1, *tensor.shape[-2:])


def _for_each_problem(function, particles, *more) -> torch.Tensor:
    """What a function of one problem makes of all, with their leading dimensions."""
    problems = particles.shape[:-2]
    if not problems:
        return function(particles, *more)
    flat = [x.reshape(-1, *x.shape[len(problems) :]) for x in (particles, *more)]
    results = torch.stack([function(*problem) for problem in zip(*flat, strict=True)])
    return results.view(*problems, *results.shape[1:])


def _accumulated(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(accumulate_dtype(tensor.dtype))


def check_matrix(name: str, tensor: torch.Tensor) -> None:
    check_floating(name, tensor)
    if tensor.dim() != 2:
        raise ValueError(f"{name}: expected shape (N, dim), got {tuple(tensor.shape)}")


def _check_matrices(name: str, tensor: torch.Tensor) -> None:
    check_floating(name, tensor)
    if tensor.dim() < 2:
        raise ValueError(f"{name}: expected shape (..., N, dim), got {tuple(tensor.shape)}")


def _check_like_particles(name: str, tensor: torch.Tensor, particles: torch.Tensor) -> None:
    _check_matrices(name, tensor)
    if tensor.dtype != particles.dtype:
        raise TypeError(f"{name}: expected the particles' {particles.dtype}, got {tensor.dtype}")
    if tensor.shape != particles.shape:
        raise ValueError(
            f"{name}: expected the particles' shape {tuple(particles.shape)}, "
            f"got {tuple(tensor.shape)}"
        )
    if tensor.device != particles.device:
        raise ValueError(f"{name}: expected the particles' {particles.device}, got {tensor.device}")


def check_rule(rule: str) -> None:
    if rule not in RULES:
        raise ValueError(f"bandwidth rule: expected one of {', '.join(RULES)}, got {rule!r}")


def _check_bandwidth(bandwidth: str | float | torch.Tensor, particles: torch.Tensor) -> None:
    if isinstance(bandwidth, torch.Tensor):
        problems = particles.shape[:-2]
        if bandwidth.shape not in ((), problems) or bandwidth.device != particles.device:
            wanted = f" or one of shape {tuple(problems)}" if problems else ""
            raise ValueError(
                f"bandwidth: expected a 0-dim tensor{wanted} on {particles.device}, got shape "
                f"{tuple(bandwidth.shape)} on {bandwidth.device}"
            )
        check_floating("bandwidth", bandwidth)
    elif isinstance(bandwidth, str):
        check_rule(bandwidth)
    elif not isinstance(bandwidth, numbers.Real) or not 0 < bandwidth <= sys.float_info.max:
        raise ValueError(
            f"bandwidth: expected a positive number, a 0-dim tensor or one of {', '.join(RULES)}, "
            f"got {bandwidth!r}"
        )


def check_number(name: str, value: float) -> None:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")


def _dispatch_update(
    op: str, particles, score, bandwidth, kernel, repulsion, precision
) -> Dispatch:
    if callable(score) and not isinstance(score, torch.Tensor):
        score = particles  # It is not called: what it returns must be like these.
    check_update(particles, score, bandwidth, kernel, repulsion, precision)
    return _dispatch(op, particles, score, bandwidth, kernel, precision)


def _dispatch(
    op: str, particles, score=None, bandwidth=None, kernel="rbf", precision="high"
) -> Dispatch:
    if why := reasons(particles, score, bandwidth):
        return Dispatch(op, "pytorch", reasons=tuple(why))
    details = {"device": particles.device.type, "dtype": name_of(particles.dtype)}
    if particles.device.type == "cuda":
        device = torch.cuda.get_device_properties(particles.device)
        *problems, count, dim = particles.shape
        forms = native.svgd_forms(
            problems=math.prod(problems),
            count=count,
            dim=dim,
            dtype=native.DTYPES.index(details["dtype"]),
            kernel=KERNELS.index(kernel),
            precision=PRECISIONS.index(precision),
            multiprocessors=device.multi_processor_count,
            shared_memory=device.shared_memory_per_block_optin,
            capability=10 * device.major + device.minor,
        )
        if op == "median_bandwidth" or isinstance(bandwidth, str):
            details["median"] = forms["median"]
        if op != "median_bandwidth":
            details["update"] = forms["update"]
    return Dispatch(op, "fused", details)


@explains(svgd_phi)
def _(
    particles, score, *, bandwidth="median", kernel="rbf", repulsion=1.0, precision="high"
) -> Dispatch:
    return _dispatch_update("svgd_phi", particles, score, bandwidth, kernel, repulsion, precision)


@explains(svgd_step)
def _(
    particles, score, step_size, *, bandwidth="median", kernel="rbf", repulsion=1.0,
    precision="high",
) -> Dispatch:  # fmt: skip
    check_number("step_size", step_size)
    return _dispatch_update("svgd_step", particles, score, bandwidth, kernel, repulsion, precision)


@explains(median_bandwidth)
def _(particles, rule="median") -> Dispatch:
    _check_matrices("particles", particles)
    check_rule(rule)
    return _dispatch("median_bandwidth", particles)
