# SPDX-License-Identifier: BSD-3-Clause
"""The examples run to their ends, hold their own checks and write their pictures."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

# What makes a run small.
SETTINGS = {
    "metric_learning": {"batches": 40},
    "batch_mining": {"batches": 80},
    "svgd_density": {"steps": 300},
    "svgd_logistic_regression": {},
    "svgd_neural_network": {"splits": 1, "steps": 300},
}


@pytest.fixture
def example(monkeypatch):
    """Imports an example by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    timing = importlib.import_module("timing")
    for name, value in {"WARM_UP": 0, "FEWEST_ROUNDS": 1, "BUDGET_SECONDS": 0}.items():
        monkeypatch.setattr(timing, name, value)
    return importlib.import_module


def assert_pictures(files, folder):
    """Each was written to the folder and shows something."""
    assert sorted(files) == sorted(folder.iterdir())
    for file in files:
        with Image.open(file) as picture:
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20, file.name


@pytest.mark.parametrize("name", SETTINGS)
def test_example(example, fused_only, monkeypatch, name, tmp_path):
    if name == "svgd_density":
        monkeypatch.setattr(example(name), "FRAMES", 8)
    files = example(name).run(torch.device("cpu"), tmp_path, **SETTINGS[name])
    assert_pictures(files, tmp_path)


def test_density_moves_in_the_animation(example, tmp_path):
    density, picture = example("svgd_density"), example("svgd_density_picture")
    particles = density.start(torch.device("cpu")).numpy()
    frames = {step: particles + step / 10 for step in range(5)}
    picture.animate(tmp_path / "density.gif", particles[:2], density.GRID_REACH, frames)
    with Image.open(tmp_path / "density.gif") as film:
        assert film.n_frames == len(frames)
        durations = []
        for frame in range(film.n_frames):
            film.seek(frame)
            durations.append(film.info["duration"])
    assert durations[-1] > 10 * durations[0]  # the end stays


@pytest.mark.slow
def test_neural_network_is_near_the_published(example, fused_only, tmp_path):
    """All ten splits; the example raises where they are clearly worse."""
    example("svgd_neural_network").run(torch.device("cpu"), tmp_path)


def test_neural_network_check_can_fail(example):
    """Neither worse than the published values nor worse than a line goes through."""
    module = example("svgd_neural_network")

    def check(rmse, likelihood, enough_splits=True):
        ours, line = ((rmse, 0), (likelihood, 0)), ((4.5, 0), (-2.9, 0))
        module.check({module.OURS: ours, module.BASELINE: line}, enough_splits)

    check(3.1, -2.6)
    check(4.0, -2.8, enough_splits=False)
    for rmse, likelihood in ((3.5, -2.6), (3.1, -2.8)):
        with pytest.raises(RuntimeError, match="published values"):
            check(rmse, likelihood)
    for rmse, likelihood in ((4.6, -2.6), (3.1, -3.0), (float("nan"), -2.6)):
        with pytest.raises(RuntimeError, match="line"):
            check(rmse, likelihood, enough_splits=False)


def test_distributed_example(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = EXAMPLES / "svgd_distributed.py"
    settings = ["--particles", "200", "--steps", "300", "--output", tmp_path]
    done = subprocess.run(
        [sys.executable, *launcher, example, *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "200 particles on 2 processes" in done.stdout
    assert_pictures([tmp_path / "svgd_distributed.png"], tmp_path)


def test_demo_names_its_parts(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py", "nothing"])
    with pytest.raises(SystemExit):
        example("demo").main()
    assert "no such part: nothing" in capsys.readouterr().err


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(monkeypatch, path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code), "outputs in git"
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": EXAMPLES}}
    ).execute()
    pictures = [
        output for cell in code for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    assert pictures
