# SPDX-License-Identifier: BSD-3-Clause
"""benchmarks/accuracy: its truth, what it draws, what it promises, and the page made of it."""

import json
import math
import sys
from pathlib import Path

import numpy
import pytest
import torch
from batch_triplet.cases import MINING, looped_loss

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
pytest.importorskip("benchmarks", reason="the benchmarks are not here")

from benchmarks import report  # noqa: E402
from benchmarks.accuracy import RESULTS, batch_triplet, svgd, triplet  # noqa: E402
from benchmarks.accuracy.measure import (  # noqa: E402
    Case,
    Undecided,
    is_worse_than_promised,
    measure_case,
)

LOSSES = ["triplet_margin_loss", "triplet_margin_loss_indexed"]
LOSSES += [f"batch_triplet_loss, {mining}" for mining in MINING]
SVGD = ["median_bandwidth", "svgd_phi", "ksd"]


@pytest.fixture
def uncompiled(monkeypatch):
    """Each would be compiled for each shape and dtype."""
    for functions in (triplet.LOSSES, triplet.INDEXED_LOSSES, batch_triplet.LOSSES, svgd.FUNCTIONS):
        monkeypatch.delitem(functions, "compile")


def small_cases(device):
    """One for each kind of results."""
    kinds = {}
    for op in (triplet, batch_triplet, svgd):
        for case in op.cases(device):
            kind = getattr(case.results_of, "args", case.results_of)
            kinds[kind] = Case(case.results_of, case.tensors, (24, 8), 2)
    return kinds.values()


def test_every_op_is_measured_and_the_truth_is_true(device, uncompiled, fused_only):
    """That of float64 by PyTorch, and by the kernels, is the truth but for some roundings."""
    rows = [
        row for case in small_cases(device) for row in measure_case(case, torch.float64, device)
    ]
    measured = [row["result"] for row in rows]
    assert [name for name in measured if not name.startswith("its")] == LOSSES + SVGD
    assert len(measured) == 2 * len(LOSSES) + len(SVGD)
    for row in rows:
        assert 0 < row["eager"] < 1e-14, row
        assert 0 <= row["fused"] < 1e-14, row
        assert row["rounding"] == 2**-53


@pytest.mark.parametrize("mining", MINING)
def test_the_truth_of_the_batch_loss_is_that_of_loops(mining):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    labels = torch.arange(24) % 6
    leaf = x.clone().requires_grad_()
    loss = looped_loss(leaf, labels, margin=batch_triplet.MARGIN, mining=mining)
    (gradient,) = torch.autograd.grad(loss, leaf)
    wide = x.numpy().astype(numpy.longdouble)
    exact_loss, exact_gradient = batch_triplet.exact_loss(wide, labels.numpy(), mining, 2**-52)
    assert abs(loss.item() - exact_loss) < 1e-14
    assert abs(gradient.numpy() - exact_gradient).max() < 1e-14


@pytest.mark.parametrize("mining", ["semihard", "hard"])
def test_less_than_the_closest_comparison_moves_no_choice(mining):
    labels = numpy.arange(12) % 3
    for seed in range(200):
        generator = numpy.random.default_rng(seed)
        d = generator.random((12, 12))
        *triplets, closest = batch_triplet.mined(d, labels, mining)
        moved = d + 0.49 * closest * generator.choice([-1, 1], d.shape)
        *others, _ = batch_triplet.mined(moved, labels, mining)
        chosen, chosen_when_moved = ({*zip(*rows, strict=True)} for rows in (triplets, others))
        assert chosen == chosen_when_moved


# Rows of two classes in turn on a line, of which the margin is 0.2: one comparison is 1e-9 apart.
@pytest.mark.parametrize(
    ("mining", "places"),
    [
        ("all", [0, 1.2 + 1e-9, 1, 3.7]),  # 0 and 1 are nearer than 0 and 1.2 by the margin
        ("semihard", [0, 3, 1, -3 - 1e-9]),  # from 0 the two negatives
        ("semihard", [0, -1 - 1e-9, 1, 3.7]),  # from 0 the positive and a negative
        ("hard", [0, 3, 1, -3 - 1e-9]),
        ("hard", [0, 9, 1, 25, -1 - 1e-9, 49]),  # from 0 the two positives
    ],
)
def test_what_rounding_may_decide_is_not_drawn(mining, places):
    x = numpy.array(places, numpy.longdouble)[:, None]
    labels = numpy.arange(len(x)) % 2
    batch_triplet.exact_loss(x, labels, mining, 2**-52)
    with pytest.raises(Undecided):
        batch_triplet.exact_loss(x, labels, mining, 2**-23)


def test_another_draw_takes_the_place_of_an_undecided_one():
    seen = []

    def results_of(inputs):
        seen.append(inputs[0])
        if len(seen) == 1:
            raise Undecided
        return {"fused": {"sum": inputs[0].sum()}}, {"sum": inputs[0].sum().numpy()}

    (row,) = measure_case(Case(results_of, 1, (4, 2), 2), torch.float64, "cpu")
    assert row["fused"] == 0
    assert len(seen) == 3
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize(
    ("fused", "is_scalar", "worse"),
    [(2.9, False, False), (3.1, False, True), (5.9, True, False), (6.1, True, True)],
)
def test_promise(fused, is_scalar, worse):
    row = {"result": "any", "shape": [4096, 64], "eager": 1.0, "rounding": 1.0}
    assert is_worse_than_promised({**row, "fused": fused, "is_scalar": is_scalar}) == worse
    assert is_worse_than_promised({**row, "fused": float("nan"), "is_scalar": is_scalar})


@pytest.mark.parametrize("eager", [math.inf, math.nan])
def test_promise_beside_an_eager_result_that_is_not_finite(eager):
    row = {"result": "any", "shape": [1, 1], "eager": eager, "rounding": 1.0, "is_scalar": False}
    assert not is_worse_than_promised({**row, "fused": 1.0})
    assert is_worse_than_promised({**row, "fused": 1.1})


def test_rows_and_page_are_of_what_is_measured(monkeypatch, tmp_path):
    rows = [json.loads(line) for line in (RESULTS / "cpu.jsonl").read_text().splitlines()]
    assert {row["result"] for row in rows} >= {*LOSSES, *SVGD}
    monkeypatch.setattr(report, "DOCS", tmp_path)
    report.write_accuracy(report.read_cases())
    assert (tmp_path / "accuracy.md").read_text() == (ROOT / "docs" / "accuracy.md").read_text()
