"""The notebook runs, and as it is committed it shows what it says."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "notebooks/train_and_serve.ipynb"


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def check(notebook: nbformat.NotebookNode) -> None:
    kinds = [x.output_type for cell in notebook.cells for x in cell.get("outputs", [])]
    assert "error" not in kinds and "display_data" in kinds
    text = printed(notebook)
    assert text.count("largest gap over 24 tokens is 0.0") == 2
    assert "bit for bit" in text and "in training" in text


def test_as_committed():
    check(nbformat.read(NOTEBOOK, as_version=4))
    assert NOTEBOOK.stat().st_size < 100_000


# nbclient's own, of event loops and of sockets that it leaves to the end.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_runs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": NOTEBOOK.parent}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()
    check(notebook)
