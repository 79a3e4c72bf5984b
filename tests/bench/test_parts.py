"""Every part runs for real on a CPU, at sizes that take seconds."""

from __future__ import annotations

import json
import math
import time

import pytest
import transformers

from rpg.bench import logp, rollout, suite, whole
from rpg.bench.logp import logp_section
from rpg.bench.rollout import rollout_section
from rpg.bench.scaling import grid, scaling_section
from rpg.bench.step import SIDES, WARMUP, SideResult
from rpg.bench.synthetic import last_digit_odd, sizes_for
from rpg.bench.table import BenchRow, Section
from rpg.bench.timing import SideFailed, apart
from rpg.bench.train import train_section
from rpg.bench.whole import step_section
from rpg.cli import main
from rpg.console import install
from rpg.costs.operations import Ceilings

SIZES = sizes_for("cpu", draws=512, repeats=1, new_tokens=8, peer_new_tokens=4)
CEILINGS = Ceilings(flops=1e11, bytes=1e10)


def quiet(text):
    pass


def finite(section, without=()):
    """Rows that have numbers, all of them finite; ``without``: rows that say instead why they have none."""
    assert not section.error
    assert [row.name for row in section.rows if row.error] == list(without)
    rows = [row for row in section.rows if not row.error]
    assert rows
    known = {column.key for column in section.columns}
    for row in rows:
        assert row.values
        assert set(row.values) <= known
        assert all(math.isfinite(value) and value >= 0 for value in row.values.values()), row
    return {row.name: row.values for row in rows}


def test_rollout(monkeypatch):
    monkeypatch.setattr(rollout, "apart", lambda function, *sizes, limit: function(*sizes))  # that process: test_apart
    section = rollout_section(SIZES, CEILINGS, quiet)
    missing = ["vLLM tiny", "vLLM with log-probabilities tiny"]  # where it is: tests/engine_vllm/test_vllm_bench.py
    assert {row.error for row in section.rows if row.name in missing} == {f"not installed: {install('rpg-rl[vllm]')}"}
    rows = finite(section, without=missing)
    own, generate = rows["rpg tiny"], rows["transformers generate tiny"]
    for found in (own, generate):
        assert found["× floor"] == pytest.approx(found["ms a step"] / found["floor ms"])
    # without a watch of its own
    assert own["tokens/s"] * own["ms a step"] / 1000 == pytest.approx(SIZES.prompts, rel=0.05)
    assert rows["transformers continuous batching tiny"]["tokens/s"] > 0
    assert len(rows) == 6


def test_rollout_targets():
    rows = [
        BenchRow("own", {"tokens/s": 100.0, "× floor": 6.0}),
        BenchRow("vllm", {"tokens/s": 50.0}),
        BenchRow("small"),
    ]
    section = Section("rollout", "", rollout.COLUMNS, rows=rows)
    rollout.set_targets(section, "own", "vllm", "small")
    assert [[t.mark for t in row.targets] for row in section.rows] == [["✓", "✗"], [], ["?"]]
    assert section.rows[0].values == {"tokens/s": 100.0, "× floor": 6.0}


def test_logp_targets():
    values = {
        "rpg linear_logp": {"ms": 10.0, "peak GiB": 2.0},
        "torch, float32 logits": {"ms": 9.0},
        "Liger GRPO loss": {"ms": 61.0, "peak GiB": 1.9},
    }
    section = Section("logp", "", logp.COLUMNS, rows=[BenchRow(name, found) for name, found in values.items()])
    logp.set_targets(section)
    assert [[t.mark for t in row.targets] for row in section.rows] == [["✗", "✓", "✗"], [], []]
    values["rpg linear_logp"] = {"ms": 9.0, "peak GiB": 1.9}
    values["Liger GRPO loss"]["ms"] = 53.0
    section.rows[:] = [BenchRow(name, found) for name, found in values.items()]
    logp.set_targets(section)
    assert [t.mark for t in section.rows[0].targets] == ["✓", "✗", "✓"]


def test_targets_of_the_head_with_its_loss():
    rows = [BenchRow("rpg head with loss", {"× products": 1.29, "peak GiB": 2.01}), BenchRow("rpg linear_logp", {})]
    section = Section("logp", "", logp.COLUMNS, rows=rows)
    logp.set_targets(section)
    assert [t.mark for t in section.rows[0].targets] == ["✓", "✗"]


def test_logp():
    skipped = ["Liger GRPO loss", "cut-cross-entropy"]
    rows = finite(logp_section(SIZES, CEILINGS, quiet), without=skipped)
    assert rows["rpg linear_logp"]["logp error"] < 1e-4
    assert rows["TRL's fused head"]["d head error"] < 1e-4
    for name in ("rpg head with loss", "rpg head with loss, float32 sum"):
        assert max(value for quantity, value in rows[name].items() if "error" in quantity) < 1e-4
    products = rows["three bare products"]["ms"]
    assert rows["rpg linear_logp"]["× products"] == pytest.approx(rows["rpg linear_logp"]["ms"] / products)


def test_train():
    rows = finite(train_section(SIZES, CEILINGS, quiet))
    assert list(rows) == ["rpg tiny", "rpg tiny, recompute"]
    for found in rows.values():
        assert found["TFLOP repeated"] > found["TFLOP"]
        assert found["% of rate"] == pytest.approx(100 * found["floor s"] / found["seconds"])
        assert found["floor s"] == pytest.approx(found["TFLOP"] * 1e12 / CEILINGS.flops)


def test_scaling():
    rows = finite(scaling_section(SIZES, CEILINGS, quiet))
    assert {name.split()[0].strip(",") for name in rows} == {"decode", "head", "train"}
    assert rows["decode tiny, 4 rows of 64"]["floor ms"] > rows["decode tiny, 4 rows of 32"]["floor ms"]
    assert rows["head, 32 × 32 × 128"]["floor ms"] == pytest.approx(2 * rows["head, 32 × 32 × 64"]["floor ms"])


def test_the_grid_of_a_gpu():
    names = list(grid(sizes_for("cuda"), CEILINGS))
    for text in ("64 rows of 8,192", "512 rows of 512", "× 256,000", "train 4b, 64 responses, recompute", "decode 17m"):
        assert any(text in name for name in names), text
    assert len(grid(sizes_for("cuda", True), CEILINGS)) < len(names)


def test_step_beside_trl(monkeypatch):
    """In this process; those of its own: test_both_sides."""
    pytest.importorskip("trl")
    verbosity = transformers.utils.logging.get_verbosity()

    def here(work, sides, watch):
        (side,), steps = sides, []
        SIDES[side](work, lambda: None, steps.append)
        return {side: SideResult(steps[WARMUP:], 1.0)}

    monkeypatch.setattr(whole, "compare", here)
    try:
        rows = finite(step_section(SIZES, CEILINGS, quiet))
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    assert list(rows) == ["rpg tiny", "TRL GRPOTrainer tiny"]
    responses = SIZES.groups * SIZES.samples
    for found in rows.values():  # every response has its full length
        assert found["tokens/s"] * found["step s"] == pytest.approx(responses * SIZES.new_tokens)
        assert found["rollout s"] + found["reward s"] + found["train s"] == pytest.approx(found["step s"])


def test_trl_tries_less_where_memory_is_short(monkeypatch):
    tried = []

    def compare(work, sides, watch):
        tried.append((work.micro, work.checkpointing))
        if work.micro > 4:
            raise SideFailed("trl: OutOfMemoryError: CUDA out of memory")
        return {"trl": "done"}

    monkeypatch.setattr(whole, "compare", compare)
    assert whole._trl(whole.StepWork(micro=8, checkpointing=True), quiet) == "done"
    assert tried == [(8, False), (8, True), (4, True)]
    assert whole._trl(whole.StepWork(micro=4, checkpointing=True), quiet) == "done"
    assert tried[3:] == [(4, False)]  # as fast as it can
    with pytest.raises(SideFailed):
        whole._trl(whole.StepWork(micro=64, checkpointing=True), quiet)


def test_the_reward_tells_responses_apart():
    assert [last_digit_odd(text, "", "") for text in ("4 7", "7 4", "")] == [1.0, 0.0, 0.0]


def test_apart():
    assert apart(math.sqrt, 4.0, limit=60) == 2.0
    with pytest.raises(SideFailed, match=r"^ValueError: "):
        apart(math.sqrt, -1.0, limit=60)
    begin = time.perf_counter()
    with pytest.raises(SideFailed, match="no answer within 1 s"):
        apart(time.sleep, 60, limit=1)
    assert time.perf_counter() - begin < 30


# ---- the suite and the command ---------------------------------------------------------------------------------------


def test_a_section_that_fails_does_not_end_the_others(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    def works(*_):
        return Section("train", "Training", suite.CEILING_COLUMNS, rows=[BenchRow("a", {"GB/s": 1.0})])

    monkeypatch.setattr(suite, "SECTIONS", {"logp": broken, "train": works})
    saved = []
    found = suite.run_suite(("logp", "train"), SIZES, quiet, lambda f: saved.append(len(f.sections)))
    assert [section.error for section in found.sections] == ["", "RuntimeError: no such kernel", ""]
    assert saved == [2, 3]
    assert found.sections[0].rows[0].values["TFLOP/s"] > 0


def test_a_row_that_fails_does_not_end_its_section(monkeypatch):
    def broken():
        raise MemoryError("too much\nreally")

    monkeypatch.setattr("rpg.bench.scaling.grid", lambda *_: {"a": broken, "b": lambda: {"ms": 1.0}})
    section = scaling_section(SIZES, CEILINGS, quiet)
    assert [(row.name, row.error) for row in section.rows] == [("a", "MemoryError: too much"), ("b", "")]


def test_command(tmp_path, capsys):
    sizes = ["--tokens", "8", "--hidden", "4", "--vocab", "12", "--matmul", "64", "--copy", "4096", "--quick"]
    files = ["--json", str(tmp_path / "found.json"), "--markdown", str(tmp_path / "found.md")]
    assert main(["bench", "logp", "--device", "cpu", *sizes, *files]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [section["name"] for section in found["sections"]] == ["ceilings", "logp"]
    assert (found["sizes"]["tokens"], found["sizes"]["vocab"], found["sizes"]["device"]) == (8, 12, "cpu")
    page = (tmp_path / "found.md").read_text()
    assert "rpg bench logp --device cpu --tokens 8" in page
    assert "| rpg linear_logp |" in page
    assert "rpg linear_logp" in capsys.readouterr().out
