"""The quickstart notebook runs, on a tiny model, and what is committed comes from a run."""

import os
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (extra dev)")
pytest.importorskip("ipykernel", reason="ipykernel is not installed (extra dev)")
nbformat = pytest.importorskip("nbformat")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts_of(cell):
    """What a cell shows: prints, and the HTML of what it displays."""
    return [output.get("text") or output.data.get("text/html", "") for output in cell.outputs]


def test_it_runs_on_a_tiny_model(notebook, model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("KVFOUNDRY_NOTEBOOK_MODEL", str(model_folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):  # leaves nothing at home
        monkeypatch.setenv(name, str(tmp_path / name))
    recorded = [cell.source for cell in code_of(notebook)]
    client = nbclient.NotebookClient(
        notebook, timeout=120, startup_timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()  # raises what a cell raises
    cells = code_of(notebook)
    assert [cell.source for cell in cells] == recorded and all(cell.execution_count for cell in cells)
    compared, shaded = "".join(texts_of(cells[1])), texts_of(cells[2])
    assert compared.count("\n") == 7 and "fullkv" in compared and "100%" in compared
    assert len(shaded) == 3 and all(html.count("<span") > 100 for html in shaded)
    # Two shades at least: what is kept differs from what is not.
    assert all("0.00)" in html and "0.60)" in html for html in shaded[-1:])
    assert "report.html" in "".join(texts_of(cells[-1]))


def test_what_is_committed_is_a_whole_run_on_the_embedded_model(notebook):
    cells = code_of(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert "blue tomatoes" in "".join(texts_of(cells[1]))
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not any(place in text for place in ("/home/", "/tmp/", "/root/", "/Users/"))
