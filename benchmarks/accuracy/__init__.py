# SPDX-License-Identifier: BSD-3-Clause
"""Errors of every op, dtype and size beside eager's and compile's: python -m benchmarks.accuracy.

The truth is formed by NumPy in extended precision, from the definitions and the inputs as they are
in their dtype. `benchmarks.report` writes what is measured into docs/accuracy.md. `triplet`,
`batch_triplet` and `svgd` hold each op's cases, `measure` what they share.
"""

from benchmarks import rows

RESULTS = rows.RESULTS / "accuracy"
