# SPDX-License-Identifier: BSD-3-Clause
"""Writes the table of what is supported, docs/support.json, into README.md and docs/install.md.

python tools/support_matrix.py            writes
python tools/support_matrix.py --check    exits with 1 where one of them is not up to date
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/install.md")
BEGIN, END = "<!-- from docs/support.json -->\n", "<!-- end -->\n"


def render(page: str, support: dict[str, str]) -> str:
    """A page's text with the table between its marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"expected the marks {BEGIN.strip()} and {END.strip()}")
    lines = ["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in support.items())]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def main() -> int:
    support = json.loads((ROOT / "docs" / "support.json").read_text())
    outdated = []
    for page in PAGES:
        old = (ROOT / page).read_text()
        new = render(old, support)
        if new != old:
            outdated.append(page)
            if "--check" not in sys.argv:
                (ROOT / page).write_text(new)
    if outdated and "--check" in sys.argv:
        print(f"{', '.join(outdated)}: not up to date: python tools/support_matrix.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
