# SPDX-License-Identifier: BSD-3-Clause
"""The launch policies as data, which needs no GPU: they cover every row and stay in its limits."""

import pytest

from fused_ops import _C

ROWS = (1, 2, 31, 264, 1000, 65_535, 65_536, 2**20 + 1, 2**33)
DIMS = (1, 2, 3, 31, 32, 33, 255, 1024, 4097, 70_001, 2**31 + 5)


def policies(form=-1):
    for rows in ROWS:
        for dim in DIMS:
            for size, aligned in ((2, True), (4, True), (8, True), (4, False)):
                for reduces in (False, True):
                    shape = {"rows": rows, "dim": dim, "element_size": size, "aligned": aligned}
                    width = 16 // size if aligned else 1
                    yield (
                        {**shape, "width": width, "reduces": reduces},
                        _C.triplet_policy(**shape, reduces=reduces, multiprocessors=132, form=form),
                    )


@pytest.mark.parametrize("form", range(-1, len(_C.TRIPLET_FORMS)))
def test_policies_cover_the_input(form):
    for case, policy in policies(form):
        threads, row_threads = policy["threads_per_block"], policy["threads_per_row"]
        segments, size = policy["segments"], policy["segment_size"]
        assert form == -1 or policy["form"] == _C.TRIPLET_FORMS[form]
        assert threads in (256, 1024), case
        assert row_threads == threads or row_threads in (1, 2, 4, 8, 16, 32), case
        assert 1 <= policy["row_blocks"] <= 65_535, case  # the limit of gridDim.y
        assert 1 <= segments < 2**31, case  # and of gridDim.x
        assert (segments - 1) * size < case["dim"] <= segments * size, case
        assert segments == 1 or size % case["width"] == 0, case
        groups = policy["row_blocks"] * (threads // row_threads)
        assert groups - threads // row_threads < case["rows"], case  # no block without a row


def test_every_form_is_chosen_somewhere():
    chosen = {policy["form"] for _, policy in policies()}
    assert chosen == set(_C.TRIPLET_FORMS)


def test_rows_are_split_only_where_whole_rows_leave_the_gpu_idle():
    for case, policy in policies():
        assert policy["form"] != "split" or case["rows"] < 264, case
