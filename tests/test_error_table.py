# SPDX-License-Identifier: BSD-3-Clause
"""docs/errors.md: what bad input raises. Each line is provoked and compared with the page.

`python tests/test_error_table.py` writes the page anew.
"""

import math
from pathlib import Path

import numpy
import pytest
import torch

import fused_ops

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"

HEAD = """\
# Errors

What bad input raises, before anything is computed: each message names the argument, what was
expected and what came. Written by `python tests/test_error_table.py`, which provokes each line; the
tests fail where one differs. `x` is `torch.ones(4, 3)` and `log_density` a function of particles
that returns one number a particle; `torch`, `numpy`, `math` and everything of `fused_ops` are
imported. On CUDA the errors are the same.
"""

# title -> calls
CALLS = {
    "triplet_margin_loss": [
        "triplet_margin_loss(x, x, x, margin=0)",
        "triplet_margin_loss(x, x, x, margin=-1.5)",
        "triplet_margin_loss(x, x, x, reduction='average')",
        "triplet_margin_loss(x[0], x, x)",
        "triplet_margin_loss(x, x[:, :2], x)",
        "triplet_margin_loss(x, x, x[:3])",
        "triplet_margin_loss(x, x, None)",
        "triplet_margin_loss(x, x, x, p='2')",
        "TripletMarginLoss(margin=0)",
        "with set_fallback('error'): triplet_margin_loss(x, x, x, p=3)",
        "with set_fallback('error'): triplet_margin_loss(x, x.double(), x)",
    ],
    "svgd_phi and svgd_step": [
        "svgd_phi([[1.0]], x)",
        "svgd_phi(x[0], x[0])",
        "svgd_phi(x.int(), x.int())",
        "svgd_phi(x, x[:3])",
        "svgd_phi(x, x.double())",
        "svgd_phi(x, x.to('meta'))",
        "svgd_phi(x, None)",
        "svgd_phi(x, numpy.ones((4, 3)))",
        "svgd_phi(x, lambda particles: particles[:2])",
        "svgd_phi(x, x, bandwidth=0.0)",
        "svgd_phi(x, x, bandwidth=-1)",
        "svgd_phi(x, x, bandwidth=math.nan)",
        "svgd_phi(x, x, bandwidth=None)",
        "svgd_phi(x, x, bandwidth='mean')",
        "svgd_phi(x, x, bandwidth=torch.ones(4))",
        "svgd_phi(x, x, bandwidth=torch.tensor(1))",
        "svgd_phi(x.expand(2, 4, 3), x.expand(2, 4, 3), bandwidth=torch.ones(3))",
        "svgd_phi(x, x, kernel='gauss')",
        "svgd_phi(x, x, repulsion='1')",
        "svgd_phi(x, x, precision='low')",
        "svgd_step(x, x, None)",
        "svgd_step(x, x, torch.tensor(0.1))",
        "with set_fallback('error'): svgd_phi(x.requires_grad_(), x)",
        "with set_fallback('error'): svgd_phi(x[:0], x[:0])",
    ],
    "median_bandwidth and ksd": [
        "median_bandwidth(x, 'mean')",
        "median_bandwidth(x.bool())",
        "median_bandwidth(x[0])",
        "ksd(x, x, statistic='w')",
        "ksd(x[:1], x[:1])",
        "ksd(x.expand(2, 4, 3), x.expand(2, 4, 3))",
    ],
    "SVGD": [
        "SVGD(x)",
        "SVGD(x, log_density, log_density)",
        "SVGD(x, 'normal')",
        "SVGD(x[:0], log_density)",
        "SVGD({}, log_density)",
        "SVGD({'a': x, 'b': x[:2]}, log_density)",
        "SVGD(x, log_density, optimizer=lambda parameters: None)",
        "SVGD(x, log_density, temperature=0.0)",
        "SVGD(x, log_density).run(-1)",
        "SVGD(x, log_density).run(10, record=0)",
        "SVGD(x, log_density).run(10, stop={'speed': 1e-3})",
        "SVGD(x, log_density).run(10, [], progress=False)",
        "SVGD(x, lambda particles: particles).step()",
        "SVGD(x, lambda particles: torch.zeros(4)).step()",
        "SVGD(x, score=lambda particles: particles[:2]).step()",
        "SVGD(x, log_density).load_state_dict({})",
    ],
    "Settings": [
        "set_fallback('never')",
        "explain(print, x)",
    ],
}


def provoke(call):
    """Runs a call, and returns what it raises."""
    names = {name: getattr(fused_ops, name) for name in fused_ops.__all__}
    names |= {"torch": torch, "numpy": numpy, "math": math, "x": torch.ones(4, 3)}
    names["log_density"] = lambda particles, *batch: -particles.square().sum(1)
    try:
        exec(call, names)
    except Exception as error:
        return error
    raise AssertionError(f"{call} raised nothing")


def line(call):
    error = provoke(call)
    text = " ".join(str(error).split()).replace("|", "\\|")
    return f"| `{call}` | {type(error).__name__} | {text} |"


def page():
    lines = [HEAD]
    for title, calls in CALLS.items():
        lines += [f"## {title}\n", "| call | error | text |", "|---|---|---|"]
        lines += [*map(line, calls), ""]
    return "\n".join(lines)


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not here")
def test_page_is_what_comes():
    assert page() == PAGE.read_text()


@pytest.mark.cuda
@pytest.mark.parametrize("title", CALLS)
def test_errors_are_the_same_on_cuda(title):
    for call in CALLS[title]:
        expected = provoke(call)
        with torch.device("cuda"):
            found = provoke(call)
        assert type(found) is type(expected)
        text = str(found).replace("cuda:0", "cpu").replace("cuda', index=0", "cpu'")
        assert text == str(expected)


if __name__ == "__main__":
    PAGE.write_text(page())
