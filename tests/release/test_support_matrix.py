# SPDX-License-Identifier: BSD-3-Clause
"""The tables of what is supported are those of docs/support.json."""

import pytest

from .loading import load_tool

support_matrix = load_tool("support_matrix")


def test_pages_are_up_to_date(monkeypatch):
    monkeypatch.setattr("sys.argv", ["support_matrix.py", "--check"])
    assert support_matrix.main() == 0


def test_table_is_replaced():
    readme = f"before\n{support_matrix.BEGIN}old\n{support_matrix.END}after\n"
    new = support_matrix.render(readme, {"Python": "3.10"})
    assert new == readme.replace("old", "| | |\n|---|---|\n| Python | 3.10 |")
    with pytest.raises(ValueError, match="expected the marks"):
        support_matrix.render("no marks", {})
