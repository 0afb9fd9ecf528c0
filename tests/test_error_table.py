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
from fused_ops import _support

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"

HEAD = """\
# Errors

What bad input raises, before anything is computed: each message names the argument, what was
expected and what came. Written by `python tests/test_error_table.py`, which provokes each line; the
tests fail where one differs. `x` is `torch.ones(4, 3)`, `i` is `torch.arange(4)` and `log_density`
a function of particles that returns one number a particle; `torch`, `numpy`, `math` and everything
of `fused_ops` are imported. On CUDA the errors are the same, but for an index out of range, which
the device finds. `explain` raises them too, but for those that values or PyTorch bring up.
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
    "triplet_margin_loss_indexed": [
        "triplet_margin_loss_indexed(x, i, i, i, margin=0)",
        "triplet_margin_loss_indexed(x, i, i, i, reduction='average')",
        "triplet_margin_loss_indexed(x, i, i, i + 1)",
        "triplet_margin_loss_indexed(x, i, i, -5 * i)",
        "triplet_margin_loss_indexed(x, i, i, i / 2)",
        "triplet_margin_loss_indexed(x, i, i, i[:2])",
        "with set_fallback('error'): triplet_margin_loss_indexed(x, i, i, i, p=3)",
    ],
    "batch_triplet_loss": [
        "batch_triplet_loss([[1.0]], i)",
        "batch_triplet_loss(x, [0, 0, 1, 1])",
        "batch_triplet_loss(x.int(), i)",
        "batch_triplet_loss(x, i / 2)",
        "batch_triplet_loss(x[0], i)",
        "batch_triplet_loss(x, i[:3])",
        "batch_triplet_loss(x, i.to('meta'))",
        "batch_triplet_loss(x, i, margin='0.2')",
        "batch_triplet_loss(x, i, margin=math.nan)",
        "batch_triplet_loss(x, i, mining='easy')",
        "batch_triplet_loss(x, i, distance='manhattan')",
        "batch_triplet_loss(x, i, reduction='max')",
        "batch_triplet_loss(x, i, soft=True)",
        "batch_triplet_loss(x, i, reference_embeddings=x)",
        "batch_triplet_loss(x, i, reference_embeddings=x.double(), reference_labels=i)",
        "batch_triplet_loss(x, i, reference_embeddings=x[:, :2], reference_labels=i)",
        "batch_triplet_loss(x, i, reference_embeddings=x, reference_labels=i[:2])",
        "with set_fallback('error'): batch_triplet_loss(x[:0], i[:0])",
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


def names():
    found = {name: getattr(fused_ops, name) for name in fused_ops.__all__}
    found |= {"torch": torch, "numpy": numpy, "math": math}
    found |= {"x": torch.ones(4, 3), "i": torch.arange(4)}
    found["log_density"] = lambda particles, *batch: -particles.square().sum(1)
    return found


def provoke(call):
    """Runs a call, and returns what it raises."""
    try:
        exec(call, names())
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


@pytest.mark.parametrize("title", CALLS)
def test_explain_raises_the_same_or_leaves_it_to_pytorch(title):
    functions = {function.__name__ for function in _support._explainers}
    for call in CALLS[title]:
        name, arguments = call.split("(", 1)
        expected = provoke(call)
        # It looks at no values, and calls no score.
        if name not in functions or type(expected) is IndexError or "lambda" in call:
            continue
        try:
            assert eval(f"explain({name}, {arguments}", names()).path == "pytorch", call
        except (TypeError, ValueError) as error:
            assert (type(error), str(error)) == (type(expected), str(expected))


@pytest.mark.cuda
@pytest.mark.parametrize("title", CALLS)
def test_errors_are_the_same_on_cuda(title):
    for call in CALLS[title]:
        expected = provoke(call)
        if type(expected) is IndexError:
            continue
        with torch.device("cuda"):
            found = provoke(call)
        assert type(found) is type(expected)
        text = str(found).replace("cuda:0", "cpu").replace("cuda', index=0", "cpu'")
        assert text == str(expected)


if __name__ == "__main__":
    PAGE.write_text(page())
