# SPDX-License-Identifier: BSD-3-Clause
"""The documentation's code runs and prints what it says, its links lead somewhere, and its
reference has every public name."""

import ast
import contextlib
import doctest
import importlib.util
import io
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist

import fused_ops

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES if page.exists()]

pytestmark = pytest.mark.skipif(
    not (ROOT / "mkdocs.yml").exists(), reason="the documentation is not here"
)

BLOCK = re.compile(
    r"(?:<!-- needs (?P<need>\w+) -->\n\n?)?^```python\n(?P<code>.*?)^```$", re.M | re.S
)
LINK = re.compile(r"\]\(<?(?P<target>[^()\s>]+)>?\)")


def code_blocks(text: str) -> list[tuple[str, str | None]]:
    """Each block of Python, behind as many empty lines as there are before it, so that a traceback
    has the page's line numbers; and what it needs."""
    return [
        ("\n" * text.count("\n", 0, match.start("code")) + match["code"], match["need"])
        for match in BLOCK.finditer(text)
    ]


def is_there(need: str | None) -> bool:
    """Whether this machine has CUDA, or a package that only some blocks are about."""
    if need == "CUDA":
        return torch.cuda.is_available()
    return need is None or importlib.util.find_spec(need) is not None


def expected_output(lines: list[str], statement: ast.stmt) -> str:
    """What the comment right behind a statement says that it prints."""
    following = []
    for line in lines[statement.end_lineno :]:
        if not line.startswith("# "):
            break
        following.append(line.removeprefix("# ") + "\n")
    return "".join(following)


def run(code: str, namespace: dict, name: str) -> None:
    """Runs a block statement by statement; one that prints must print the comment behind it."""
    lines = code.splitlines()
    for statement in ast.parse(code, name).body:
        printed = io.StringIO()
        compiled = compile(ast.Module([statement], []), name, "exec")
        with contextlib.redirect_stdout(printed):
            exec(compiled, namespace)
        if printed.getvalue():
            want, got = expected_output(lines, statement), printed.getvalue()
            options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            if not doctest.OutputChecker().check_output(want, got, options):
                message = f"{name}:{statement.lineno} printed\n{got}where the page says\n{want}"
                raise AssertionError(message)


@pytest.fixture
def as_before():
    """Undoes what a page sets for the whole process."""
    with fused_ops.set_fallback("allow"), fused_ops.set_gradients_in_forward(True):
        yield
    fused_ops.patch_torch(False)


@pytest.fixture
def one_process(monkeypatch):
    """The environment of torchrun --nproc-per-node 1, for pages that start a process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("as_before", "one_process", "inductor_cache", "fresh_compiler")
@pytest.mark.parametrize("name", NAMES)
def test_code_runs(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where a page may write files
    torch.manual_seed(0)
    namespace = {"__name__": "page"}
    for code, need in code_blocks((ROOT / name).read_text()):
        if not is_there(need):
            compile(code, name, "exec")
        else:
            run(code, namespace, name)


def test_a_wrong_comment_is_found():
    for code in ("print(1)\n# 2\n", "print(1)\n"):
        with pytest.raises(AssertionError, match=r"page\.md:1 printed\n1"):
            run(code, {}, "page.md")
    run("print(1.23)\n# 1.2...\n", {}, "page.md")


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and mkdocs form them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for match in LINK.finditer(text):
        address = urlsplit(match["target"])
        if address.scheme or address.netloc:
            assert address.scheme == "https" and "." in address.netloc, match["target"]
            continue
        target = page.parent / address.path if address.path else page
        assert target.exists(), f"{name} links to {match['target']}"
        if address.fragment and target.name != "api.md":  # whose anchors are names of objects
            assert address.fragment in anchors(target), f"{name} links to {match['target']}"


def test_reference_has_every_public_name():
    public = {f"fused_ops.{name}" for name in fused_ops.__all__}
    public |= {f"fused_ops.distributed.{name}" for name in fused_ops.distributed.__all__}
    shown = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(shown) == sorted(public)
