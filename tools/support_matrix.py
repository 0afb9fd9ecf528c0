# SPDX-License-Identifier: BSD-3-Clause
"""Writes the table of what is supported, docs/support.json, into README.md.

python tools/support_matrix.py            writes
python tools/support_matrix.py --check    exits with 1 where README.md is not up to date
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- from docs/support.json -->\n", "<!-- end -->\n"


def render(readme: str, support: dict[str, str]) -> str:
    """README's text with the table between its marks replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"README.md: expected the marks {BEGIN.strip()} and {END.strip()}")
    lines = ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in support.items())]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def main() -> int:
    readme = ROOT / "README.md"
    support = json.loads((ROOT / "docs" / "support.json").read_text())
    old = readme.read_text()
    new = render(old, support)
    if "--check" in sys.argv:
        if new != old:
            print("README.md is not up to date: python tools/support_matrix.py")
        return int(new != old)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
