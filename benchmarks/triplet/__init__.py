# SPDX-License-Identifier: BSD-3-Clause
"""Benchmark of triplet_margin_loss against eager PyTorch and torch.compile."""

from benchmarks.triplet.cases import cases

__all__ = ["cases"]
