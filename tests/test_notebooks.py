"""Every notebook runs from top to bottom, as committed."""

import pathlib

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own, which shows pictures
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert "loss before the restart" in printed
    assert pictures


def test_there_is_a_quick_start():
    assert "quickstart" in [path.stem for path in NOTEBOOKS]
