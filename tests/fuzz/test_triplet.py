# SPDX-License-Identifier: BSD-3-Clause
"""triplet_margin_loss: losses and gradients of any call, against torch's function in float64."""

import math
from dataclasses import dataclass

import torch
from hypothesis import assume
from hypothesis import strategies as st
from triplet.cases import (
    INPUTS,
    NORMS,
    REDUCTION_NUMBERS,
    REDUCTIONS,
    assert_same_bits,
    backward_op,
    correct_gradients_op,
    error_of,
    forward_op,
    forward_with_gradients_op,
    leaves,
    random_tensor,
    torch_loss,
)

from fused_ops import _C, explain, set_fallback, set_gradients_in_forward, triplet_margin_loss
from fused_ops._support import accumulate_dtype

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

# Rows and columns, in the classes that launch policies tell apart, none too large
SHAPES = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 70)),
    st.tuples(st.integers(1, 5), st.integers(70, 5000)),
    st.tuples(st.integers(1, 600), st.integers(1, 130)),
    st.tuples(st.sampled_from([1, 3, 140]), st.sampled_from([255, 256, 1001, 1024, 4099])),
    st.tuples(st.sampled_from([1, 2]), st.sampled_from([16_381, 32_768, 70_001])),
    st.tuples(st.sampled_from([3000, 20_000, 66_000]), st.integers(1, 8)),
)
WAYS = ("as called", "in the backward", *_C.TRIPLET_FORMS)
UPSTREAM = ("ones", "random", "zero", "all expanded", "every other column", "nan", "inf")


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    dtype: torch.dtype
    p: float
    eps: float
    margin: float
    swap: bool
    reduction: str
    values: str
    special: tuple[float, float, float]  # put into some rows of each input, 0 for none
    equal: str  # which inputs have equal rows
    layouts: tuple[str, str, str]
    upstream: str
    needs_grad: tuple[bool, bool, bool]
    way: str
    seed: int

    @property
    def settings(self):
        return {name: getattr(self, name) for name in ("margin", "p", "eps", "swap", "reduction")}

    def inputs(self, device):
        generator = torch.Generator().manual_seed(self.seed)
        values = [random_values(generator, self.shape, self.values, self.dtype) for _ in INPUTS]
        for x, value in zip(values, self.special, strict=True):
            if value != 0 and x.numel() > 0:
                spoil(generator, x, value)
        if self.equal != "none" and len(self.shape) > 1:
            for name in self.equal.split(" and "):
                values[INPUTS.index(name)][::2] = values[0][::2]
        tensors = [x.to(device, self.dtype) for x in values]
        return [LAYOUTS[name](x) for name, x in zip(self.layouts, tensors, strict=True)]

    def grad_loss(self, loss):
        if self.upstream in ("ones", "zero"):
            return torch.full_like(loss, self.upstream == "ones")
        grad = random_tensor(*loss.shape, dtype=loss.dtype, device=loss.device, seed=self.seed)
        if self.upstream in LAYOUTS:
            return LAYOUTS[self.upstream](grad) if grad.dim() > 0 else grad
        if self.upstream != "random" and grad.numel() > 0:
            grad.view(-1)[0] = float(self.upstream)
        return grad


@st.composite
def split_rows(draw, shapes):
    """(rows, dim) with the rows in no, one or several leading dimensions."""
    rows, dim = draw(shapes)
    lead = draw(st.sampled_from(["one", "one", "none", "two", "three"]))
    if lead == "none":
        return (dim,)
    first = draw(st.sampled_from([d for d in (1, 2, 3, 4, 5) if rows % d == 0]))
    split = {"one": (rows,), "two": (first, rows // first), "three": (first, 1, rows // first)}
    return (*split[lead], dim)


def fields():
    of_inputs = st.tuples(*3 * [layouts])
    return {
        "shape": split_rows(SHAPES),
        "dtype": dtypes,
        "p": st.sampled_from(NORMS),
        "eps": st.sampled_from([1e-6, 0.0, 0.25, -0.25, 1e-3, 1e-12]),
        "margin": st.sampled_from([1.0, 0.5, 2.0, 5.0, 1e-6, 0.3, 1e4, math.inf]),
        "swap": st.booleans(),
        "reduction": st.sampled_from(REDUCTIONS),
        "values": st.sampled_from(VALUES),
        "special": st.just((0, 0, 0)),
        "equal": st.sampled_from(["none", "none", "positive", "negative", "positive and negative"]),
        "layouts": of_inputs,
        "upstream": st.sampled_from(UPSTREAM),
        "needs_grad": st.tuples(*3 * [st.booleans()]),
        "way": st.sampled_from(WAYS),
        "seed": seeds,
    }


def cases(**changes):
    return st.builds(Case, **fields() | changes)


def run(case, inputs, grad_loss_of):
    """The loss and the three gradients, None where not wanted, the way that the case says."""
    wanted = any(case.needs_grad)
    if case.way in ("as called", "in the backward"):
        tensors = leaves(inputs, case.needs_grad)
        with set_gradients_in_forward(case.way == "as called"):
            loss = triplet_margin_loss(*tensors, **case.settings)
        if wanted:
            loss.backward(grad_loss_of(loss.detach()))
        return [loss.detach(), *(x.grad for x in tensors)]
    form = _C.TRIPLET_FORMS.index(case.way)
    settings = (case.margin, case.p, case.eps, case.swap, REDUCTION_NUMBERS[case.reduction])
    arguments = (*inputs, *settings)
    if case.seed % 2 == 0 and inputs[0].is_cuda:
        results = forward_with_gradients_op(*arguments, False, *case.needs_grad, form)
        loss, state, *gradients = results
        correct_gradients_op(grad_loss_of(loss), *inputs, state, *settings, *gradients, form)
    else:
        loss, state = forward_op(*arguments, False, wanted, form)
        gradients = [None] * 3
        if wanted:
            gradients = backward_op(
                grad_loss_of(loss), *inputs, state, *settings, *case.needs_grad, form
            )
    return [loss, *(g if n else None for g, n in zip(gradients, case.needs_grad, strict=True))]


def torch_results(case, inputs, dtype, grad_loss):
    """The loss and its gradients by torch's function in `dtype`."""
    tensors = leaves([x.to(dtype) for x in inputs])
    loss = torch_loss(*tensors, **case.settings)
    return [loss.detach(), *torch.autograd.grad(loss, tensors, grad_loss.to(dtype))]


def check(case, device):
    inputs = case.inputs(device)
    before = [x.clone() for x in inputs]
    grad_losses = []

    def grad_loss_of(loss):
        grad_losses.append(case.grad_loss(loss))
        return grad_losses[0]

    with set_fallback("error"), poisoned():
        results = run(case, inputs, grad_loss_of)
        assert_same_bits(run(case, inputs, grad_loss_of)[:1], results[:1])
    assert_same_bits(inputs, before)
    loss = results[0]
    assert loss.dtype == case.dtype
    assert loss.shape == (case.shape[:-1] if case.reduction == "none" else ())
    compare(case, inputs, results, grad_losses[0] if grad_losses else torch.ones_like(loss))


def compare(case, inputs, results, grad_loss):
    """Compares with torch's function in float64, and its errors in the accumulation type."""
    exact = torch_results(case, inputs, torch.float64, grad_loss)
    eager = torch_results(case, inputs, accumulate_dtype(case.dtype), grad_loss)
    rows = Rows(case, inputs)
    for name, result, *others in zip(("loss", *INPUTS), results, exact, eager, strict=True):
        if result is None:
            continue
        assert result.shape == others[0].shape and result.dtype == case.dtype, name
        if name == "loss":
            rows.compare_loss(*(x.reshape(-1) for x in (result, *others)))
        else:
            upstream = grad_loss.double().reshape(-1).expand(rows.count).abs()
            shape = rows.count, rows.dim
            rows.compare_gradient(name, upstream, *(x.reshape(shape) for x in (result, *others)))


class Rows:
    """What rounding to the accumulation type does to each row, by its distances in float64."""

    def __init__(self, case, inputs):
        self.case = case
        self.info = torch.finfo(accumulate_dtype(case.dtype))
        self.count, self.dim = inputs[0].numel() // case.shape[-1], case.shape[-1]
        a, p, n = (x.double().reshape(self.count, self.dim) for x in inputs)
        pairs = [(a, p), (a, n), (p, n)] if case.swap else [(a, p), (a, n)]
        self.differences = [x - y + case.eps for x, y in pairs]
        self.distances = torch.stack([d.norm(case.p, dim=-1) for d in self.differences])
        unit = self.info.eps
        self.lost = [unit * (x.abs() + y.abs() + abs(case.eps)) for x, y in pairs]  # in differences
        self.scale = self.distances.amax(0) + case.margin
        # Float64 is held against torch's sums in float64, which err more than ours.
        self.units = unit * (4 if unit > 1e-10 else 64 + math.sqrt(self.dim))
        # Of equal differences the roundings are all the same, over all that torch adds up one after
        # the other in float64; over some hundreds at most in ours.
        if any((d == d[:, :1]).all(-1).any() for d in self.differences):
            self.units += unit * (self.dim if unit < 1e-10 else min(self.dim, 256)) / 4
        self.close = self.info.eps * (16 + math.sqrt(self.dim))  # relative, of distances
        self.wild = self.beyond_range()
        nearest = self.distances[1:].amin(0)  # which is NaN where one of them is
        self.unclamped = case.margin + self.distances[0] - nearest

    def compare_loss(self, result, truth, eager):
        errors, wild = self.units * self.scale, self.wild
        if self.case.reduction != "none":
            errors, wild = getattr(errors, self.case.reduction)(), wild.any()
        assert_near("loss", result, truth, eager, errors, wild)

    def compare_gradient(self, name, upstream, result, truth, eager):
        upstream, truth, errors, loose = self.terms(upstream, truth)
        if self.case.p == math.inf:  # whose elements below the maximum torch multiplies with zero
            no_number = ~upstream.isfinite() & truth.isnan() & ~result.isnan()
            truth = torch.where(no_number, result.double(), truth)
        assert_near(name, result, truth, eager, errors, loose, 2.1 * upstream)

    def terms(self, upstream, truth):
        """The upstream gradient of each row, the row's own without what torch has of inactive ones,
        how far it may be off, and where it may be anything up to twice the upstream gradient."""
        case = self.case
        if case.reduction == "mean":
            upstream = upstream / self.count
        upstream = upstream[:, None]
        # Where the gradient jumps within what rounding does to the distances, either side will do.
        either = self.jumps()[:, None].expand(truth.shape)
        errors = (self.units * upstream).expand(truth.shape)
        for difference, distance, lost in zip(
            self.differences, self.distances, self.lost, strict=True
        ):
            if case.p == 1:
                either = either | (difference.abs() > 0) & (difference.abs() <= 2 * lost)
            elif case.p == 2:
                part = torch.where(distance[:, None] == 0, 0.0, lost / distance[:, None])
                errors = errors + 2 * upstream * part.nan_to_num(0, 0, 0)
        # Below the hinge the gradient is zero, where torch may have 0 * inf.
        below = (self.unclamped < 0) & ~self.near_hinge() & ~self.wild
        truth = torch.where(below[:, None] & ~truth.isfinite(), 0.0, truth)
        return upstream, truth, errors, either | self.wild[:, None]

    def beyond_range(self):
        """Rows with a distance that the accumulation type has not, or not with all its digits."""
        wild = torch.zeros_like(self.scale, dtype=torch.bool)
        for difference in self.differences:
            largest = difference.abs().nan_to_num(0, 0, 0).amax(-1)
            if self.case.p == 2 and self.dim > 1:
                squares = largest.square()
                wild |= squares * self.dim > self.info.max / 16
                wild |= (squares < self.info.tiny / self.info.eps) & (largest > 0)
            wild |= largest > self.info.max / 16 / self.dim
        return wild

    def near_hinge(self):
        return self.unclamped.isfinite() & (self.unclamped.abs() <= self.close * self.scale)

    def jumps(self):
        """Rows that are near the hinge, a tie of the swap or of the maximum, or distance zero, but
        not exactly there."""
        case = self.case
        exact = case.values == "lattice" and case.eps in (0.0, 0.25, -0.25) and self.dim < 10_000
        jumps = self.near_hinge() & ~((self.unclamped == 0) & exact)
        if case.swap:
            apart = (self.distances[1] - self.distances[2]).abs()
            # Torch adds up equal differences in the order of their memory.
            alike = (self.differences[1] == self.differences[2]).all(-1)
            alike &= case.layouts[0] == case.layouts[1]
            same = alike | exact & (apart == 0)
            jumps |= apart.isfinite() & (apart <= self.close * self.distances.amax(0)) & ~same
        for difference, distance, lost in zip(
            self.differences, self.distances, self.lost, strict=True
        ):
            if case.p == math.inf:
                below = distance[:, None] - difference.abs()
                jumps |= ((below > 0) & (below <= 4 * lost)).any(-1)
            elif case.p == 2:
                jumps |= (
                    distance.isfinite() & (distance > 0) & (distance <= 100 * lost.norm(dim=-1))
                )
        return jumps


def assert_near(name, result, truth, eager, errors, loose, bound=math.inf):
    """Errors of twice torch's own are allowed, those given, and a rounding to the result's type.

    Where `loose`, what torch has in the accumulation type is as good as the truth, or anything
    within the bound.
    """
    info = torch.finfo(result.dtype)
    rounded, expected = result.double(), truth.to(result.dtype).double()
    own = (eager.double() - truth).abs().nan_to_num(0, 0, 0)
    if own.dim() == 2:
        own = own.amax(-1, keepdim=True)
    allowed = 2 * own + errors + info.eps * truth.abs() + info.tiny * info.eps
    near = (rounded - truth).abs() <= allowed
    # Around the largest number of the type a rounding more or less decides.
    near |= (rounded == expected) | (truth.abs() + allowed > info.max) & (
        rounded.sign() == truth.sign()
    ) & (rounded.abs() > info.max / 2)
    near |= result.isnan() & truth.isnan()
    as_torch = (rounded == eager.to(result.dtype).double()) | result.isnan() & eager.isnan()
    near |= loose & (as_torch | (rounded.abs() <= bound + info.tiny * info.eps))
    if not near.all():
        place = tuple((~near).nonzero()[0].tolist())
        shown = [x.expand(near.shape)[place].item() for x in (result, truth, eager, allowed)]
        raise AssertionError(
            f"{name}{list(place)}: {shown[0]}, float64 {shown[1]}, torch {shown[2]}, "
            f"at most {shown[3]} apart; {int((~near).sum())} of {near.numel()}"
        )


@parts
def test_finite_values(device, part):
    fuzz(lambda case: check(case, device), cases(), part, share=0.16)


NON_FINITE = st.sampled_from([0, math.nan, math.inf, -math.inf])


@parts
def test_special_values(device, part):
    found = cases(
        special=st.tuples(*3 * [NON_FINITE]), values=st.sampled_from(["normal", "lattice"])
    )
    fuzz(lambda case: check(case, device), found, part, share=0.05)


def check_fallback(case, device):
    """What the kernels do not take is torch's own to the bit, its errors included."""
    inputs = case.inputs(device)
    if case.way == "split":
        inputs[1] = inputs[1][..., :1, :] if len(case.shape) > 1 else inputs[1][:1]
    arguments = leaves(inputs, case.needs_grad)
    assume(explain(triplet_margin_loss, *arguments, **case.settings).path == "pytorch")

    def results_of(function):
        tensors = leaves(inputs, case.needs_grad)
        loss = function(*tensors, **case.settings)
        if any(case.needs_grad):
            loss.backward(case.grad_loss(loss.detach()))
        return [loss.detach(), *(x.grad for x in tensors if x.grad is not None)]

    try:
        expected = results_of(torch_loss)
    except Exception:
        assert error_of(results_of, triplet_margin_loss) == error_of(results_of, torch_loss)
    else:
        assert_same_bits(results_of(triplet_margin_loss), expected)


@parts
def test_fallback(device, part):
    some, none = st.integers(1, 20), st.integers(0, 1)
    empty = st.one_of(st.tuples(none, some), st.tuples(some, none), st.tuples(none, some, some))
    norms = st.sampled_from([0, 0.5, 1.5, 3, 40.0, -1, -math.inf, 1, 2, math.inf])
    found = cases(shape=st.one_of(empty, st.tuples(some, some)), p=norms)
    fuzz(lambda case: check_fallback(case, device), found, part, share=0.03)


def check_second_gradients(case, device):
    """Of a sum that both the loss and the gradients are in, in float64."""
    inputs = case.inputs(device)

    def second(function):
        tensors = leaves(inputs)
        loss = function(*tensors, **case.settings).sum()
        gradients = torch.autograd.grad(loss, tensors, create_graph=True)
        total = loss.square() + sum(gradient.square().sum() for gradient in gradients)
        return torch.autograd.grad(total, tensors)

    torch.testing.assert_close(
        second(triplet_margin_loss), second(torch_loss), rtol=1e-9, atol=1e-9, equal_nan=True
    )


@parts
def test_second_gradients(device, part):
    found = cases(
        shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
        dtype=st.just(torch.float64),
        values=st.sampled_from(["normal", "small"]),
        equal=st.just("none"),
        margin=st.sampled_from([1.0, 0.3, 5.0]),
    )
    fuzz(lambda case: check_second_gradients(case, device), found, part, share=0.01)
