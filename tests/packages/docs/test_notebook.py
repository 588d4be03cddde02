"""docs/first-curve.ipynb runs from its first cell to its last, and a learning curve is the result."""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

REASON = "the notebook needs nbclient and ipykernel, which requirements.txt has"
nbformat = pytest.importorskip("nbformat", reason=REASON)
nbclient = pytest.importorskip("nbclient", reason=REASON)
pytest.importorskip("ipykernel", reason=REASON)

NOTEBOOK = ROOT / "docs" / "first-curve.ipynb"


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_is_kept_without_outputs() -> None:
    """A difference then shows what changed. One cell has the parameters."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert len(cells) >= 4
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    assert [cell.metadata.get("tags") for cell in cells].count(["parameters"]) == 1


def test_the_notebook_draws_a_curve(tmp_path: Path) -> None:
    """All cells, with 600 steps instead of 4,000, in a folder of the test's own."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = (cell for cell in code_cells(notebook) if cell.metadata.get("tags") == ["parameters"])
    parameters.source += f"\nSTEPS, FOLDER = 600, Path({str(tmp_path)!r})"
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=os.environ | {"PYTHONPATH": str(ROOT)})  # raises the error of a cell
    cells = code_cells(notebook)
    assert all(cell.execution_count for cell in cells)
    for seed in (1, 2):
        with (tmp_path / f"seed-{seed}" / "evaluations.csv").open() as file:
            returns = [float(row["return"]) for row in csv.DictReader(file) if row["step"] == "600"]
        assert len(returns) == 10
        shown = f"{sum(returns) / 10:.1f}"
        assert any(shown in output.get("data", {}).get("text/plain", "") for cell in cells for output in cell.outputs)
    pictures = [output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 1
    assert (tmp_path / "curve.png").stat().st_size > 5_000
