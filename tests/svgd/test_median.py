# SPDX-License-Identifier: BSD-3-Clause
"""The bandwidth: the median bit for bit what a sort of the same distances gives, and the rules."""

import math

import pytest
import torch

from fused_ops import median_bandwidth, svgd_phi

from .cases import (
    DTYPES,
    RULES,
    assert_same_bits,
    bandwidth_by_sorting,
    distances_op,
    exact_distances,
    random_tensor,
)

pytestmark = pytest.mark.usefixtures("fused_only")

rules = pytest.mark.parametrize("rule", RULES)


def check_median(particles, rule):
    h = median_bandwidth(particles, rule)
    expected = bandwidth_by_sorting(distances_op(particles), rule)
    if particles.dtype == torch.float64 and particles.is_cuda:  # whose log may round otherwise
        torch.testing.assert_close(h, expected, rtol=2**-51, atol=0)
    else:
        assert_same_bits(h, expected)
    assert h.shape == ()
    assert h.device == particles.device
    assert h > 0
    return h


def clusters(*sizes, dim=3):
    """Rows of zeros, of ones, of twos and so on."""
    values = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return values[:, None].expand(-1, dim).double()


@pytest.mark.usefixtures("poisoned_memory")
@rules
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 2, 33, 70])
def test_median_is_that_of_a_sort(device, dim, dtype, rule):
    """Odd and even counts of pairs and of N * N; those of 16-bit particles have many ties."""
    for count in (*range(1, 12), 64, 65, 130, 257):
        check_median(random_tensor(count, dim, dtype=dtype, device=device, seed=count), rule)


@pytest.mark.parametrize(
    ("count", "rule"),
    [
        (1023, "median"),
        (1024, "reference"),
        (1025, "paper"),
        (2047, "paper"),
        (2048, "median"),
        (2049, "reference"),
        (2049, "paper"),
    ],
)
def test_median_where_paths_change(device, count, rule):
    check_median(random_tensor(count, 3, device=device), rule)
    check_median(random_tensor(count, 2, device=device).round(), rule)


@pytest.mark.cuda
@rules
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "dim"), [(2100, 257), (4096, 64), (5000, 1)])
def test_median_of_many(count, dim, dtype, rule):
    check_median(random_tensor(count, dim, dtype=dtype, device="cuda"), rule)


DUPLICATES = {
    "few values": lambda: random_tensor(200, 2).round(),
    "two values": lambda: (random_tensor(150, 1) > 0.3).double(),
    "pairs of equal rows": lambda: random_tensor(70, 3).repeat(2, 1),
    "half of the rows equal": lambda: torch.cat([random_tensor(60, 3), torch.zeros(60, 3)]),
    "all pairs at one distance": lambda: torch.eye(40),
    "all pairs but one at one distance": lambda: torch.cat([torch.eye(40), torch.eye(1, 40)]),
    "a lattice": lambda: torch.cartesian_prod(torch.arange(12.0), torch.arange(12.0)),
    "the median at a cluster's edge": lambda: clusters(7, 7),  # 42 pairs within, 49 across
    "zero by one pair": lambda: clusters(6, 3),  # 18 pairs within, 18 across
    "two collapsed groups": lambda: clusters(50, 200),
    "two groups and one row": lambda: clusters(50, 200, 1),
    "one distinct row": lambda: clusters(100, 1),
    "identical rows": lambda: torch.ones(100, 5),
    "neighbouring floats": lambda: 1 + torch.arange(90.0)[:, None] * 2**-23,
}


@rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DUPLICATES)
def test_median_among_duplicates(device, name, dtype, rule):
    particles = DUPLICATES[name]().to(device, dtype)
    order = torch.randperm(len(particles), generator=torch.Generator().manual_seed(0))
    h = check_median(particles, rule)
    assert_same_bits(check_median(particles[order.to(device)], rule), h)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # d2 of three particles at 0, 1 and 3: 1, 4 and 9, and over N * N: 0 0 0 1 1 4 4 9 9.
        ("median", 1 / math.log(3)),
        ("paper", 4 / (2 * math.log(3))),
        ("reference", 1 / (2 * math.log(4))),
    ],
)
def test_rules_by_hand(device, rule, expected):
    h = median_bandwidth(torch.tensor([[0.0], [3], [1]], device=device), rule)
    assert h.item() == pytest.approx(expected, rel=2**-23)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # At 0, 0, 1 and 3: 0 1 1 4 9 9 between pairs; over N * N six zeros, then 1 1 1 1 4 4.
        ("median", 1 / math.log(4)),
        ("paper", ((1 + 2) / 2) ** 2 / (2 * math.log(4))),
        ("reference", 1 / (2 * math.log(5))),
    ],
)
def test_rules_by_hand_with_an_even_count(device, rule, expected):
    h = median_bandwidth(torch.tensor([[0.0], [3], [0], [1]], device=device), rule)
    assert h.item() == pytest.approx(expected, rel=2**-23)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("median", 4.0), ("paper", 4 / (2 * math.log(2))), ("reference", 2 / (2 * math.log(3)))],
)
def test_rules_of_two_particles(device, rule, expected):
    """d2 is 4. Over N * N it is 0 0 4 4: the lower median is zero, the mean of two is not."""
    h = median_bandwidth(torch.tensor([[1.0], [3]], device=device), rule)
    assert h.item() == pytest.approx(expected, rel=2**-23)


def test_zero_median_falls_back_to_the_mean(device):
    """Fault hyppo#92: of 31,125 pairs 10,000 are sqrt(3) apart."""
    h = median_bandwidth(clusters(50, 200).to(device, torch.float32))
    assert h.item() == pytest.approx(3 * 10_000 / 31_125 / math.log(250), rel=2**-22)


@rules
def test_bandwidth_is_1_where_no_distance_is_left(device, rule):
    for particles in (torch.ones(1, 4), torch.ones(50, 4)):
        assert median_bandwidth(particles.to(device), rule).item() == 1


@rules
@pytest.mark.parametrize("exponent", [-30, -20, -14, 13, 20, 30])
def test_bandwidth_scales_with_the_particles(device, exponent, rule):
    """No floor and no ceiling: a factor 2^k of the particles is 4^k in h, to the bit."""
    particles = random_tensor(100, 5, device=device)
    h = median_bandwidth(particles * 2.0**exponent, rule)
    assert_same_bits(h, median_bandwidth(particles, rule) * 4.0**exponent)


@pytest.mark.parametrize("spread", [1e-6, 1e-4, 1e6])
def test_scale_of_phi(device, spread):
    """h is far below the 1e-5 that the benchmark entry clamps it to."""
    particles, score = random_tensor(2, 100, 5, device=device).unbind()
    h = bandwidth_by_sorting(exact_distances(spread * particles), "median").item()
    assert median_bandwidth(spread * particles).item() == pytest.approx(h, rel=1e-5)
    phi = svgd_phi(spread * particles, score / spread)
    torch.testing.assert_close(phi, svgd_phi(particles, score) / spread, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("count", [46_342, 65_537, 70_000])
def test_rank_among_more_than_2_to_the_31_pairs(count):
    """pytorch#197470. Of 0, 1, 2, ... in any order, count - k pairs are k apart."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    particles = order[:, None].float().cuda()
    rank = ((count * count - 1) // 2 - count) // 2
    gaps = torch.arange(1, count)
    gap = gaps[(count - gaps).cumsum(0) > rank][0].float()
    expected = (gap.square().double() / math.log(count)).float()
    assert_same_bits(median_bandwidth(particles).cpu(), expected)


def middle_distances(count, rule):
    """The two in the middle of points 0, 1, 2 and so on, of which count - d pairs are d apart."""
    distances = torch.arange(count, dtype=torch.float64)
    numbers = (count - distances.long()) * (1 if rule == "paper" else 2)
    numbers[0] = 0 if rule == "paper" else count
    ends = numbers.cumsum(0)
    total = int(ends[-1])
    upper = (total - 1) // 2 if rule == "median" else total // 2
    return [distances[torch.searchsorted(ends, m + 1)].item() for m in ((total - 1) // 2, upper)]


@rules
@pytest.mark.parametrize(
    ("device", "count"),
    [
        ("cpu", 3001),
        *(pytest.param("cuda", n, marks=pytest.mark.cuda) for n in (46_342, 65_537, 70_000)),
    ],
)
def test_ranks_of_more_pairs_than_31_bits_count(device, count, rule):
    """Of points on a line, where the distances that are counted are known without counting."""
    particles = torch.arange(count, dtype=torch.float32, device=device)[:, None]
    lower, upper = (
        torch.tensor(d).float().square().double() for d in middle_distances(count, rule)
    )
    expected = (lower + upper) / 2
    if rule == "paper":
        expected = (expected + (lower * upper).sqrt()) / 2
    divisor = {"median": 1, "paper": 2, "reference": 2}[rule]
    expected /= divisor * math.log(count + 1 if rule == "reference" else count)
    assert median_bandwidth(particles, rule).item() == pytest.approx(expected.item(), rel=1e-7)
