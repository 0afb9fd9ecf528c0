# SPDX-License-Identifier: BSD-3-Clause
"""The files that mkdocs adds to those in docs, to build the site: see mkdocs.yml."""

import importlib.util
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
CSS = """\
/* Formulas keep their size on a phone, and scroll. */
div.arithmatex { overflow-x: auto; overflow-y: hidden; }
.md-typeset .arithmatex svg { max-width: none; }
.md-typeset td .arithmatex { white-space: nowrap; }
.md-typeset td code { word-break: normal; }
/* The heads of tables that have none. */
.md-typeset thead:not(:has(th:not(:empty))) { display: none; }
/* Pictures are drawn on white. */
.md-typeset img { background: white; }
"""


def on_files(files, config):
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
