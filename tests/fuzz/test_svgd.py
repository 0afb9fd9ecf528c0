# SPDX-License-Identifier: BSD-3-Clause
"""SVGD: phi, steps, medians, the discrepancy and gradients of any call, against float64."""

import math
from dataclasses import dataclass

import torch
from hypothesis import assume, reject
from hypothesis import strategies as st
from svgd.cases import (
    KERNEL_NUMBERS,
    KERNELS,
    RULE_NUMBERS,
    RULES,
    assert_same_bits,
    bandwidth_by_sorting,
    bandwidth_op,
    distances_op,
    exact_distances,
    random_tensor,
    update_op,
)
from svgd.test_ksd import STATISTICS, exact_ksd, own_mean

from fused_ops import _C, ksd, median_bandwidth, set_fallback, svgd_phi, svgd_step
from fused_ops._support import accumulate_dtype
from fused_ops.svgd.function import PRECISIONS

from .strategies import (
    LAYOUTS,
    VALUES,
    dtypes,
    fuzz,
    layouts,
    parts,
    poisoned,
    random_values,
    seeds,
    spoil,
)

FORMS = getattr(_C, "SVGD_FORMS", ())  # of the CUDA kernels; the CPU has one
# Errors of phi as parts of the norm of its terms' magnitudes, beside twice those of PyTorch. Those
# of precisions are of more than 2048 particles, in float32 on CUDA.
PROMISED = {"highest": 2e-6, "high": 2e-5, "medium": 1e-3}


def shapes(device):
    """(..., N, dim): the classes that kernels tell apart. Many particles take the CPU long."""
    few = st.tuples(st.integers(1, 40), st.integers(1, 40))
    some = st.tuples(st.integers(40, 140), st.integers(1, 20))
    wide = st.tuples(st.integers(1, 9), st.integers(40, 3000))
    tiles = st.tuples(st.sampled_from([63, 64, 65, 127, 128, 129, 256, 257]), st.integers(1, 70))
    problems = st.tuples(st.integers(1, 7), st.integers(1, 70), st.integers(1, 33))
    nested = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 20), st.integers(1, 9))
    chosen = [few, few, some, wide, tiles, problems, nested]
    if device == "cuda":
        many = st.sampled_from([513, 1023, 1024, 1025, 1500, 2047, 2048])
        most = st.integers(2049, 2120)
        dims = st.one_of(st.integers(1, 20), st.sampled_from([32, 33, 64, 70]))
        chosen += [st.tuples(many, dims), st.tuples(most, dims), st.tuples(most, dims)]
    return st.one_of(*chosen)


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    dtype: torch.dtype
    bandwidth: str | float  # a rule, or a factor of the dimensions
    as_tensor: str  # how a number is passed
    kernel: str
    repulsion: float
    precision: str
    step_size: float | None
    values: str
    special: float  # put into some rows, 0 for none
    equal: float  # the share of rows that are equal
    layouts: tuple[str, str]
    form: str
    rows: tuple[float, float]  # what of the rows a forced form is asked for, from where
    seed: int

    def inputs(self, device):
        generator = torch.Generator().manual_seed(self.seed)
        kinds = self.values, "lattice" if self.values == "lattice" else "normal"
        values = [random_values(generator, self.shape, kind, self.dtype) for kind in kinds]
        equal = torch.rand(self.shape[-2], generator=generator) < self.equal
        values[0][..., equal, :] = values[0][..., :1, :].clone()
        if self.special != 0:
            spoil(generator, values[self.seed % 2], self.special)
        tensors = [x.to(device, self.dtype) for x in values]
        return [LAYOUTS[name](x) for name, x in zip(self.layouts, tensors, strict=True)]

    def h(self, particles):
        """What is passed as bandwidth, and its value for each problem in the accumulation type."""
        accumulate = accumulate_dtype(self.dtype)
        problems = particles.shape[:-2]
        if isinstance(self.bandwidth, str):
            return self.bandwidth, median_bandwidth(particles, self.bandwidth)
        number = self.bandwidth * particles.shape[-1]
        found = torch.full(problems, number, dtype=accumulate, device=particles.device)
        if self.as_tensor == "number":
            return number, found
        if self.as_tensor == "scalar":
            return found.new_tensor(number), found
        found = found * (1 + torch.arange(found.numel(), device=found.device).view(problems))
        return found, found


def cases(device, **changes):
    fields = {
        "shape": shapes(device),
        "dtype": dtypes,
        "bandwidth": st.one_of(st.sampled_from(RULES), st.sampled_from([0.02, 0.3, 2.0, 50.0])),
        "as_tensor": st.sampled_from(["number", "scalar", "problems"]),
        "kernel": st.sampled_from(KERNELS),
        "repulsion": st.sampled_from([1.0, -1.0, 0.0, 2.5]),
        "precision": st.sampled_from(PRECISIONS),
        "step_size": st.sampled_from([None, None, 0.0, 0.3, -1.0]),
        "values": st.sampled_from(VALUES),
        "special": st.just(0),
        "equal": st.sampled_from([0, 0, 0, 0.2, 0.9, 1]),
        "layouts": st.tuples(layouts, layouts),
        "form": st.sampled_from(["as called", "as called", "automatic", *FORMS]),
        "rows": st.sampled_from([(0, 1), (0, 0.5), (0.3, 0.7), (0.9, 0.1)]),
        "seed": seeds,
    }
    return st.builds(Case, **fields | changes)


def flat_problems(*tensors):
    """Tuples of one problem each."""
    return zip(*(x.reshape(-1, *x.shape[-2:]) for x in tensors), strict=True)


def run(case, particles, score, bandwidth):
    """The update and the rows that it is of; no example where the form does not take the call."""
    settings = {"bandwidth": bandwidth, "kernel": case.kernel, "repulsion": case.repulsion}
    if case.form == "as called" or particles.dim() > 3:
        settings["precision"] = case.precision
        if case.step_size is None:
            return svgd_phi(particles, score, **settings), slice(None)
        return svgd_step(particles, score, case.step_size, **settings), slice(None)
    count = particles.shape[-2]
    first = min(int(case.rows[0] * count), count - 1)
    rows = max(1, int(case.rows[1] * count))
    if particles.dim() == 3 or rows + first > count:
        first, rows = 0, count
    tensor = bandwidth if isinstance(bandwidth, torch.Tensor) else None
    if tensor is not None:
        tensor = tensor.expand(particles.shape[:-2]).contiguous()
    try:
        result = update_op(
            particles, score, tensor, RULE_NUMBERS.get(bandwidth, -1) if tensor is None else -1,
            bandwidth if isinstance(bandwidth, float) else 0.0, KERNEL_NUMBERS[case.kernel],
            case.repulsion, case.step_size, PRECISIONS.index(case.precision),
            FORMS.index(case.form) if case.form in FORMS else -1, first, rows,
        )  # fmt: skip
    except RuntimeError as error:
        assert f"form: {case.form} " in str(error)
        reject()
    return result, slice(first, first + rows)


def phi_of(x, s, h, kernel, repulsion):
    """phi and the sum of its terms' magnitudes, in the inputs' dtype, in blocks of rows."""
    count, dim = x.shape
    results = []
    for rows in x.split(max(1, 2**23 // (count * dim))):
        differences = rows[:, None, :] - x
        scaled = differences.square().sum(-1) / (2 * h)
        if kernel == "rbf":
            weight = torch.exp(-scaled)
            slope = weight / h
        else:
            weight = (1 + scaled).rsqrt()
            slope = weight.pow(3) / (2 * h)
        repelled = repulsion * slope[:, :, None] * differences
        phi = (weight[:, :, None] * s + repelled).sum(1)
        results.append(torch.stack([phi, weight @ s.abs() + repelled.abs().sum(1)]) / count)
    return torch.cat(results, 1)


def results_of(case, x, s, h):
    """What the call is to return, and its terms' magnitudes, in the inputs' dtype."""
    phi, terms = phi_of(x, s, h, case.kernel, case.repulsion)
    if case.step_size is None:
        return phi, terms
    return x + case.step_size * phi, x.abs() + abs(case.step_size) * terms


def check_values(case, device):
    particles, score = case.inputs(device)
    bandwidth, h = case.h(particles)
    before = particles.clone(), score.clone()
    with set_fallback("error"), poisoned():
        result, rows = run(case, particles, score, bandwidth)
        again, _ = run(case, particles, score, bandwidth)
    for x, former in zip((result, particles, score), (again, *before), strict=True):
        assert_same_bits(x, former)
    assert result.dtype == case.dtype
    assert result.shape == particles[..., rows, :].shape
    of_problems = flat_problems(result, particles, score)
    for (found, x, s), own_h in zip(of_problems, h.reshape(-1), strict=True):
        compare(case, found, x, s, own_h, rows, device)


def compare(case, found, x, s, h, rows, device):
    accumulate = accumulate_dtype(case.dtype)
    exact, terms = (y[rows] for y in results_of(case, x.double(), s.double(), h.double()))
    eager, _ = (y[rows] for y in results_of(case, x.to(accumulate), s.to(accumulate), h))
    info = torch.finfo(case.dtype)
    many = device == "cuda" and len(x) > 2048 and accumulate == torch.float32
    promised = PROMISED[case.precision if many else "highest"]
    if accumulate == torch.float64:
        promised = 1e-14
    if case.special != 0 or not eager.isfinite().all():
        largest = promised * terms.nan_to_num(0, 0, 0).norm()
        return compare_special(found, x[rows], s, eager, terms, largest, case.special == 0)
    beyond = exact.abs() > 0.99 * info.max  # of float16
    assert (found[beyond].abs() > 0.98 * info.max).all()
    error, own = ((y.double() - exact)[~beyond].norm() for y in (found, eager))
    rounding = info.eps * exact[~beyond].norm() + info.tiny * info.eps * math.sqrt(exact.numel())
    allowed = 2 * own + promised * terms.norm() + rounding
    assert error <= allowed, (
        f"error {error}, torch's {own}, terms {terms.norm()}, at most {allowed}"
    )


def compare_special(found, x, score, eager, terms, promised, may_be_finite):
    """NaN and infinity are where PyTorch has them in the accumulation type. In the row of an
    infinite particle there is NaN, not all of it: CUDA forms no distance from itself. Of finite
    inputs a result may be finite, or another infinity, where PyTorch's overflows on the way."""
    good = x.isfinite().all(-1)
    assert found[~good].isnan().any(-1).logical_or(eager[~good].isfinite().all(-1)).all()
    found, eager = found[good], eager[good].to(found.dtype)
    same = (found == eager) | found.isnan() & eager.isnan()
    if not score.isfinite().all():  # whose product with a weight around the smallest is either
        same |= ~found.isfinite() & ~eager.isfinite()
    info = torch.finfo(found.dtype)
    allowed = terms[good].nan_to_num(0, 0, 0) * (1e-4 + info.eps) + promised
    same |= (found.double() - eager.double()).abs() <= allowed
    if may_be_finite:
        same |= ~eager.isfinite()
    assert same.all(), f"{found[~same][:3]} for {eager[~same][:3]}"


@parts
def test_finite_values(device, part):
    fuzz(lambda case: check_values(case, device), cases(device), part, share=0.12)


@parts
def test_special_values(device, part):
    special = st.sampled_from([math.nan, math.inf, -math.inf])
    values = st.sampled_from(["normal", "lattice", "shifted"])
    found = cases(device, special=special, values=values)
    fuzz(lambda case: check_values(case, device), found, part, share=0.05)


def check_median(case, device):
    particles, _ = case.inputs(device)
    rule = case.bandwidth
    with set_fallback("error"), poisoned():
        if case.form == "as called" or particles.dim() > 3:
            found = median_bandwidth(particles, rule)
        else:
            form = FORMS.index(case.form) if case.form in FORMS else -1
            try:
                found = bandwidth_op(particles, RULE_NUMBERS[rule], form)
            except RuntimeError as error:
                assert f"form: {case.form} " in str(error)
                reject()
        assert found.shape == particles.shape[:-2]
        problems = [problem for (problem,) in flat_problems(particles)]
        distances = [distances_op(problem) for problem in problems]
    for h, problem, own in zip(found.reshape(-1), problems, distances, strict=True):
        check_distances(own, problem)
        check_bandwidth(h, own, rule)


def check_distances(distances, particles):
    """Sums of squares of differences, all of them positive: each is off by its own roundings."""
    exact = exact_distances(particles)
    info = torch.finfo(distances.dtype)
    finite = particles.isfinite().all(-1)
    finite = finite[:, None] & finite & (exact < info.max / 2)
    dim = particles.shape[-1]
    allowed = exact * info.eps * (4 + dim) + dim * info.tiny * info.eps
    assert ((distances.double() - exact).abs() <= allowed)[finite].all()
    assert not distances.isnan()[finite].any()


def check_bandwidth(h, distances, rule):
    """The bits of a sorted matrix; of a mean that takes a zero median's place, a rounding less."""
    pairs = distances[torch.ones_like(distances, dtype=torch.bool).triu(1)]
    if pairs.isnan().any():
        assert h.isnan()
        return
    # An h below the smallest number is that number, for a zero could not be divided by.
    smallest = torch.finfo(h.dtype).tiny * torch.finfo(h.dtype).eps
    expected = bandwidth_by_sorting(distances.fill_diagonal_(0), rule).clamp(min=smallest)
    around_zero = len(pairs) > 0 and (pairs == 0).double().mean() > 0.4
    if around_zero or (h.dtype == torch.float64 and h.is_cuda):  # whose log may round otherwise
        torch.testing.assert_close(h, expected, rtol=4 * torch.finfo(h.dtype).eps, atol=0)
    else:
        assert_same_bits(h, expected)


@parts
def test_medians(device, part):
    special = st.sampled_from([0, 0, 0, math.nan, math.inf])
    found = cases(device, special=special, bandwidth=st.sampled_from(RULES))
    fuzz(lambda case: check_median(case, device), found, part, share=0.06)


def check_ksd(case, device):
    particles, score = case.inputs(device)
    bandwidth, h = case.h(particles)
    statistic = STATISTICS[case.seed % 2]
    assume(statistic == "v" or len(particles) > 1)
    settings = {"kernel": case.kernel, "statistic": statistic}
    with set_fallback("error"):
        found = ksd(particles, score, bandwidth=bandwidth, **settings)
    assert found.shape == ()
    assert found.dtype == accumulate_dtype(case.dtype)
    if not (particles.isfinite().all() and score.isfinite().all()):
        assert not found.isfinite()
        return
    h = h.item()
    exact = exact_ksd(particles, score, bandwidth=h, **settings)
    unit = 4e-7 if found.dtype == torch.float32 else 1e-13
    error, allowed = (found - exact).abs(), unit * own_mean(score, h, case.kernel)
    assert error <= allowed, f"{found} for {exact}, at most {allowed} apart"


@parts
def test_discrepancies(device, part):
    matrices = shapes(device).filter(lambda shape: len(shape) == 2)
    found = cases(
        device,
        shape=matrices,
        special=st.sampled_from([0, 0, 0, math.nan]),
        values=st.sampled_from(["normal", "lattice", "shifted", "large", "small"]),
    )
    fuzz(lambda case: check_ksd(case, device), found, part, share=0.03)


def check_gradients(case, device):
    """Those of any subset of the inputs, through the reference, with a bandwidth that is given."""
    particles, score = case.inputs(device)
    h = torch.full((), case.bandwidth * particles.shape[-1], device=device, dtype=torch.float64)
    step_size = case.step_size or 1.0
    needs_grad = [case.seed >> bit & 1 == 1 for bit in range(3)]
    assume(any(needs_grad))

    def gradients(*inputs):
        leaves = [x.detach().requires_grad_(n) for x, n in zip(inputs, needs_grad, strict=True)]
        particles, score, h = leaves
        settings = {"bandwidth": h, "kernel": case.kernel, "repulsion": case.repulsion}
        step = svgd_step(particles, score, step_size, **settings)
        upstream = random_tensor(*step.shape, device=device, seed=case.seed).to(step.dtype)
        wanted = [x for x in leaves if x.requires_grad]
        return torch.autograd.grad(step, wanted, upstream)

    exact = gradients(particles.double(), score.double(), h)
    eps = torch.finfo(case.dtype).eps
    for found, truth in zip(gradients(particles, score, h), exact, strict=True):
        assert found.shape == truth.shape
        error = (found.double() - truth).norm()
        assert error <= 100 * eps * (truth.norm() + math.sqrt(truth.numel()))


@parts
def test_gradients(device, part):
    small = st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 6))
    found = cases(
        device,
        shape=st.one_of(small, st.tuples(st.integers(1, 30), st.integers(1, 20))),
        bandwidth=st.sampled_from([0.3, 2.0, 50.0]),
        values=st.sampled_from(["normal", "lattice"]),
    )
    fuzz(lambda case: check_gradients(case, device), found, part, share=0.02)
