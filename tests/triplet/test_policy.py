# SPDX-License-Identifier: BSD-3-Clause
"""The launch policies as data, which needs no GPU: they cover every row and stay in its limits."""

import itertools

import pytest

from fused_ops import _C

ROWS = (1, 2, 31, 264, 1000, 65_535, 65_536, 2**20 + 1, 2**33)
DIMS = (1, 2, 3, 31, 32, 33, 255, 1024, 4097, 70_001, 2**31 + 5)

# An H200, and the least that the architectures we compile for have
DEVICES = [
    {"multiprocessors": 132, "shared_memory": 232_448},
    {"multiprocessors": 20, "shared_memory": 65_536},
]


def policies(form=-1):
    for rows in ROWS:
        for dim in DIMS:
            for size, whole, packed in itertools.product((2, 4, 8), (True, False), (True, False)):
                if dim * size % 16 != 0 if whole else packed and dim * size % 16 == 0:
                    continue
                case = {"rows": rows, "dim": dim, "element_size": size}
                case |= {"whole": whole, "packed": packed}
                for device in DEVICES:
                    yield case | device, _C.triplet_policy(**case, **device, form=form)


@pytest.mark.parametrize("form", range(-1, len(_C.TRIPLET_FORMS)))
def test_policies_cover_the_input(form):
    for case, policy in policies(form):
        threads, row_threads = policy["threads_per_block"], policy["threads_per_row"]
        segments, size = policy["segments"], policy["segment_size"]
        width = 16 // case["element_size"]
        # A first access may start before its row.
        span = case["dim"] if case["whole"] else case["dim"] + width - 1
        assert form == -1 or policy["form"] == _C.TRIPLET_FORMS[form]
        assert threads in (64, 128, 256, 512), case
        assert row_threads == threads or row_threads in (1, 2, 4, 8, 16, 32), case
        assert 1 <= policy["row_blocks"] <= 65_535, case  # the limit of gridDim.y
        assert 1 <= segments < 2**31, case  # and of gridDim.x
        assert (segments - 1) * size < span <= segments * size, case
        assert segments == 1 or size % width == 0, case
        assert 0 < policy["shared_bytes"] <= case["shared_memory"], case
        assert policy["stages"] in (1, 2), case
        covered = policy["accesses"] * row_threads * width
        assert policy["holds_rows"] == (
            segments == 1 and policy["form"] != "split" and covered >= span
        ), case
        groups, tile_rows = threads // row_threads, policy["tile_rows"]
        taken = tile_rows or groups  # rows that a block takes at once
        assert (policy["row_blocks"] - 1) * taken < case["rows"], case  # no block without a row
        if tile_rows == 0:
            needed = policy["accesses"] * policy["stages"] * threads * 48
        else:
            assert case["packed"] and not case["whole"] and policy["form"] != "split", case
            assert tile_rows % groups == 0 and policy["stages"] == 2, case
            # Rows start anywhere within 16 bytes.
            memory = -(-(tile_rows * case["dim"] + width - 1) // width) * 16
            needed = 2 * 3 * memory
        assert policy["shared_bytes"] == needed, case


def test_rows_are_held_up_to_the_longest():
    longest = _C.TRIPLET_LONGEST_HELD_ROW
    for size in (2, 4, 8):
        for row_bytes, holds in ((16, True), (longest, True), (longest + 16, False)):
            case = {"rows": 10_000, "dim": row_bytes // size, "element_size": size}
            case |= {"whole": True, "packed": True}
            assert _C.triplet_policy(**case, **DEVICES[0])["holds_rows"] == holds, case


def test_every_form_is_chosen_somewhere():
    chosen = {policy["form"] for _, policy in policies()}
    assert chosen == set(_C.TRIPLET_FORMS)


def test_rows_are_split_where_whole_rows_leave_the_gpu_idle_or_are_long():
    for case, policy in policies():
        if policy["form"] == "split":
            assert case["rows"] < case["multiprocessors"] or case["dim"] > 2**17 - 8, case


def test_no_block_sums_a_long_row_alone():
    for case, policy in policies():
        long = policy["segment_size"] > 2**17 + 8
        blocks = 1024 // policy["threads_per_block"] * case["multiprocessors"]
        assert not long or policy["segments"] >= blocks // 2, case
