# SPDX-License-Identifier: BSD-3-Clause
"""Benchmark of batch_triplet_loss against PyTorch and the libraries of the field."""

from benchmarks.batch_triplet.cases import cases

__all__ = ["cases"]
