# SPDX-License-Identifier: BSD-3-Clause
"""The parts that several processes share: a median of shared pairs, and phi of some rows. One
process plays all of them here; test_distributed.py has real ones."""

import math

import pytest
import torch

from fused_ops.svgd.function import RULES

from .cases import (
    KERNEL_NUMBERS,
    RULE_NUMBERS,
    assert_same_bits,
    bandwidth_op,
    distances_op,
    random_inputs,
    random_tensor,
    update_op,
)

memory_op = torch.ops.fused_ops.svgd_share_memory.default
pass_op = torch.ops.fused_ops.svgd_share_pass.default
bandwidth_of_shares_op = torch.ops.fused_ops.svgd_share_bandwidth.default

FORMS = {"automatic": -1, "tiles": 1, "direct": 2, "products": 3, "missed": 4}


def shared_bandwidth(particles, rule, shares, form=-1):
    """The bandwidth that every one of `shares` processes finds."""
    rule = RULE_NUMBERS[rule]
    memories = [memory_op(particles, shares, form) for _ in range(shares)]
    first, last = memories[0][1:]
    received = None
    for index in range(first, last + 1):
        messages = [
            pass_op(particles, memory, received, rule, index, share, shares, form)
            for share, (memory, _, _) in enumerate(memories)
        ]
        received = torch.stack(messages).sum(0)
    found = [
        bandwidth_of_shares_op(particles, memory, received, rule, shares, form)
        for memory, _, _ in memories
    ]
    for other in found[1:]:
        assert_same_bits(other, found[0])
    return found[0]


def particles_of(kind, count, dim, dtype, device):
    x = random_tensor(count, dim, dtype=dtype, device=device)
    if kind == "sorted":  # one share has all the short distances
        x = x[x.norm(dim=1).argsort()]
    elif kind == "lattice":
        x = (2 * x).round()
    elif kind == "mostly equal":
        x[count // 5 :] = 1
    elif kind == "equal":
        x = torch.ones_like(x)
    elif kind == "far":
        x = x + 1e3
    elif kind == "NaN":
        x[count // 2, 0] = math.nan
    return x


KINDS = ["gaussian", "sorted", "lattice", "mostly equal", "equal", "far", "NaN"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_median_of_shares(device, dtype, rule, kind):
    """Bit for bit that of one process, whatever the number of shares, also more than tiles."""
    for count, dim in ((2, 3), (3, 1), (131, 5), (400, 40)):
        particles = particles_of(kind, count, dim, dtype, device)
        expected = bandwidth_op(particles, RULE_NUMBERS[rule])
        for shares in (1, 2, 3, 7):
            found = shared_bandwidth(particles, rule, shares)
            if dtype == torch.float64 and kind == "mostly equal":
                # A mean, in float64 sums of another order, takes a zero median's place.
                torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
            else:
                assert_same_bits(found, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["median", "reference"])
def test_median_of_many(rule, kind, form):
    """In every form; the single process's was compared with a sort."""
    for count, dim in ((2049, 64), (5000, 16), (3000, 300)):
        if form == "products" and dim > 256:
            continue
        particles = particles_of(kind, count, dim, torch.float32, "cuda")
        expected = bandwidth_op(particles, RULE_NUMBERS[rule])
        for shares in (1, 2, 5):
            found = shared_bandwidth(particles, rule, shares, FORMS[form])
            assert_same_bits(found, expected)


@pytest.mark.parametrize("kernel", KERNEL_NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("count", "dim"), [(70, 3), (2300, 20), (2500, 64)])
def test_rows_of_the_update(device, dtype, kernel, count, dim):
    """Those of all rows, to what another order of the sums costs."""
    if device == "cpu" and count > 100:
        count, dim = count // 10, dim // 2
    particles, score = random_inputs(count, dim, dtype, device)
    settings = None, -1, 3.0, KERNEL_NUMBERS[kernel], 1.0, 0.5
    whole = update_op(particles, score, *settings)
    tolerance = {torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    for first, rows in ((0, 1), (0, count), (5, 64), (count - 3, None), (count // 2, 20)):
        part = update_op(particles, score, *settings, first_row=first, rows=rows)
        end = count if rows is None else min(first + rows, count)
        torch.testing.assert_close(part, whole[first:end], rtol=tolerance, atol=tolerance)


@pytest.mark.cuda
@pytest.mark.parametrize("form", ["tiles", "direct", "products"])
@pytest.mark.parametrize("precision", [0, 1, 2])
def test_rows_in_every_form(form, precision):
    particles, score = random_inputs(3001, 64, device="cuda")
    settings = None, -1, 3.0, 0, 1.0, None, precision, FORMS[form]
    whole = update_op(particles, score, *settings)
    for first, rows in ((0, 3001), (1, 1000), (64, 64), (1027, 1500), (3000, 1)):
        part = update_op(particles, score, *settings, first_row=first, rows=rows)
        error = (part - whole[first : first + rows]).norm() / whole[first : first + rows].norm()
        assert error < (1e-3 if precision == 2 else 2e-5), error


def test_rows_are_checked(device):
    particles, score = random_inputs(8, 3, device=device)
    for first, rows in ((-1, None), (8, None), (0, 0), (3, 6)):
        with pytest.raises(RuntimeError, match="first_row and rows: expected some of the 8"):
            update_op(particles, score, None, 0, 0.0, 0, 1.0, None, first_row=first, rows=rows)


def test_shares_are_checked(device):
    particles = random_tensor(8, 3, device=device)
    memory, first, _ = memory_op(particles, 2)
    with pytest.raises(RuntimeError, match="share: expected 0 to shares - 1, got 2 of 2"):
        pass_op(particles, memory, None, 0, first, 2, 2)
    with pytest.raises(RuntimeError, match="received: expected the sum of all messages"):
        pass_op(particles, memory, memory, 0, first + 1, 0, 2)


def test_opcheck(device):
    particles = random_tensor(8, 3, device=device)
    memory, first, _ = memory_op(particles, 2)
    utilities = ["test_schema", "test_faketensor"]
    arguments = particles, memory, None, 0, first, 0, 2
    torch.library.opcheck(pass_op, arguments, test_utils=utilities)
    message = pass_op(*arguments)
    arguments = particles, memory, message, 0, 2
    torch.library.opcheck(bandwidth_of_shares_op, arguments, test_utils=utilities)


def test_distances_are_symmetric(device):
    """Or else the shares would disagree about a pair."""
    distances = distances_op(random_tensor(300, 33, device=device))
    assert_same_bits(distances, distances.T.contiguous())
