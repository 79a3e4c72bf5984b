"""examples/first_steps.ipynb runs from top to bottom, and says what stands in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_steps.ipynb"


def told(cell) -> str:
    """What a cell shows as text, without warnings."""
    outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    return "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in outputs)


def shown(notebook) -> dict[str, str]:
    return {cell.source: told(cell) for cell in notebook.cells if cell.cell_type == "code"}


def test_the_notebook_goes_from_a_loss_to_a_trained_model_to_an_audit(tmp_path):
    stored = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(fresh, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    before, after = shown(stored), shown(fresh)
    assert len(after) == 10

    def of(words: str, where=after) -> str:
        (text,) = (text for source, text in where.items() if words in source)
        return text

    for words in ("logp.grad", "method.formula", 'seeds=1, divergence="none").names', '"grpo"], seeds=1'):
        assert of(words) == of(words, before)  # exact: the same on any machine
    scores = ast.literal_eval(of("rpg.train("))
    assert scores[20] > scores[0] + 0.15
    assert scores.keys() == ast.literal_eval(of("rpg.train(", before)).keys()
    low, high = (float(share) for share in re.findall(r"([\d.]+)%[,\]]", of("run.evaluate"))[:2])
    assert 100 * scores[0] < low < high
    (page,) = (out.data["text/html"] for cell in fresh.cells[-1:] for out in cell.outputs if "data" in out)
    assert page.startswith("<iframe")
    assert (tmp_path / "runs").is_dir()
