# SPDX-License-Identifier: BSD-3-Clause
"""What SECURITY.md says of the sources and of the workflows."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SOURCES = sorted(
    path
    for folder in ("fused_ops", "examples", "benchmarks", "tools")
    for path in (ROOT / folder).rglob("*.py")
)
DANGEROUS_MODULES = {"pickle", "marshal", "shelve", "dill", "joblib"}
DANGEROUS_CALLS = {"eval", "exec", "system", "popen"}

needs_sources = pytest.mark.skipif(not WORKFLOWS, reason="the workflows are not here")


def faults_of(source):
    """What may run data: modules that unpickle, eval, shells, loads of more than weights."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from {name.split(".")[0] for name in names} & DANGEROUS_MODULES
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called.split(".")[-1] in DANGEROUS_CALLS or given.get("shell") == "True":
                yield called
            if called == "torch.load" and given.get("weights_only") != "True":
                yield "torch.load of more than weights"
            if called.endswith("load") and given.get("allow_pickle") == "True":
                yield called


@needs_sources
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_run_no_data(path):
    assert not list(faults_of(path.read_text()))


@needs_sources
def test_documentation_runs_no_data():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
            assert not list(faults_of(block)), page


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "torch.load('a')",
        "torch.load('a', weights_only=False)",
        "numpy.load('a', allow_pickle=True)",
    ],
)
def test_faults_are_found(source):
    assert list(faults_of(source))


@needs_sources
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows(path):
    """Actions of a commit, a token that reads, and packages by hash where files are released."""
    text = path.read_text()
    for action in re.findall(r"uses: *(\S+)", text):
        assert action.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
    assert re.search(r"^permissions:\n  contents: read\n(?!  )", text, re.M)
    writes = re.findall(r"^ +([\w-]+): write", text, re.M)
    allowed = ["id-token", "attestations", "contents"] if path.name == "release.yml" else []
    assert writes == allowed
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
    assert "pull_request_target" not in text
    # An expression in a script is replaced before the shell sees it, quotes and all.
    for script in re.findall(r"run: *(.+(?:\n {10,}.+)*)", text):
        assert "${{" not in script, script
    for command in re.findall(r"pip install .+", text):
        # torch is compiled against, and not shipped
        assert "--require-hashes" in command or "pip install torch" in command, command


@needs_sources
def test_pins():
    """Each package has one version and a hash, and each that is asked for is there."""
    for path in (ROOT / ".github" / "requirements").glob("*.in"):
        pins = path.with_suffix(".txt").read_text()
        packages = re.findall(r"^([\w.-]+)==\S+.*\\\n    --hash=sha256:[0-9a-f]{64}", pins, re.M)
        assert len(packages) == len(re.findall(r"^\w", pins, re.M))
        for line in path.read_text().splitlines():
            assert line.startswith("#") or re.match(r"[\w-]+", line)[0] in packages, line
