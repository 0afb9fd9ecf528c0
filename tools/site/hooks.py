# SPDX-License-Identifier: BSD-3-Clause
"""What mkdocs does besides, to build the site: see mkdocs.yml."""

import importlib.util
import logging
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
CSS = """\
/* Formulas keep their size on a phone, and scroll. */
div.arithmatex { overflow-x: auto; overflow-y: hidden; }
.md-typeset .arithmatex svg { max-width: none; }
.md-typeset td .arithmatex { white-space: nowrap; }
.md-typeset td code { word-break: normal; }
/* Columns of numbers as narrow as they may be. */
.md-typeset table:not([class]) th { min-width: 3rem; }
.md-typeset table:not([class]) :is(th, td) { padding: 0.7em 0.8em; }
/* The heads of tables that have none. */
.md-typeset thead:not(:has(th:not(:empty))) { display: none; }
/* Pictures are drawn on white. */
.md-typeset img { background: white; }
"""


# What docstrings.py should have made Markdown of, as it looks in a page.
LEFT_OVER = re.compile(r":\w+:<code>|\.\. \w+::|={3,} +={3,}")


def on_files(files, config):
    """Adds what is not in docs."""
    # MathJax comes from a package that holds a copy, so that no page asks another server for it.
    package = importlib.util.find_spec("mathjax").submodule_search_locations[0]
    mathjax = Path(package) / "static" / "mathjax"
    added = {
        "assets/mathjax/tex-svg.js": mathjax / "es5" / "tex-svg.js",
        "assets/mathjax/LICENSE": mathjax / "LICENSE",
        "contributing.md": ROOT / "CONTRIBUTING.md",
        "changelog.md": ROOT / "CHANGELOG.md",
    }
    for name, source in added.items():
        files.append(File.generated(config, name, abs_src_path=str(source)))
    files.append(File.generated(config, "assets/site.css", content=CSS))
    return files


def on_page_content(html, page, config, files):
    """Warns, which ends a strict build, of reStructuredText in a page."""
    for text in LEFT_OVER.findall(html):
        logging.getLogger("mkdocs").warning(f"{page.file.src_path}: reStructuredText: {text}")
    return html
