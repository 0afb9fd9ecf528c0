# SPDX-License-Identifier: BSD-3-Clause
"""The docstrings' reStructuredText as Markdown, which mkdocstrings takes them for.

Docstrings keep to PyTorch's conventions, in which editors and notebooks show them. They use little
of the syntax: :math:, .. math::, references to objects, simple tables and Example::.
"""

import re

import griffe

DISPLAY = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<first>.*)\n(?P<rest>(?:(?P=indent) +\S.*\n?|\n)*)", re.M
)
RULE = r"^=+(?: +=+)+ *\n"
TABLE = re.compile(f"{RULE}(?P<head>.+\n){RULE}(?P<body>(?:.+\n)+?){RULE[:-2]}(?:\n|$)", re.M)


def display(match: re.Match) -> str:
    formula = " ".join(f"{match['first']} {match['rest']}".split())
    return f"\n$$\n{formula}\n$$\n\n"


def reference(match: re.Match) -> str:
    name = match[1].removeprefix("~")
    if name.startswith("fused_ops."):
        return f"[`{name}`][{name}]"
    return f"`{name}`"


def table(match: re.Match) -> str:
    head, *body = (
        [cell.strip() for cell in re.split(r" {2,}", line.strip())]
        for line in (match["head"] + match["body"]).splitlines()
    )
    lines = [head, ["---"] * len(head), *body]
    return "\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n\n"


def to_markdown(text: str) -> str:
    text = TABLE.sub(table, text)
    text = DISPLAY.sub(display, text)
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = re.sub(r":(?:func|class|meth|mod|attr):`([^`]+)`", reference, text)
    return re.sub(r"^( *Examples?)::$", r"\1:", text, flags=re.M)


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
