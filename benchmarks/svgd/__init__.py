# SPDX-License-Identifier: BSD-3-Clause
"""Benchmark of SVGD against eager PyTorch and torch.compile."""

from benchmarks.svgd.cases import cases

__all__ = ["cases"]
