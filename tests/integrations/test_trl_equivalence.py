"""The same batch through `rpg train` and through TRL's trainer: the same loss, the same gradients."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl")

from integrations.equivalence import OF_A_RESPONSE, TOLERANCE, same, through_rpg_train
from integrations.trl_fixed import CASES, IN_TWO, MEASURED, label, overlong, through_trl, weighed

TESTS = Path(__file__).parent.parent


@cache
def expected(name):
    (case,) = (case for case in CASES if label(case) == name)
    return through_rpg_train(weighed(case), 1)


def tolerance(case):
    return OF_A_RESPONSE if case.method.loss.level != "token" or "kl_to_go" in case.options else TOLERANCE


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_one_process(case, accumulation):
    same(through_trl(case, accumulation), expected(label(case)), tolerance(case))


def same_metrics(found, expected):
    """Means over tokens and maxima do not depend on the cut; quantiles and the like do."""
    for name in ("entropy", "kl/old", "kl/ref", "clip/low", "clip/high", "ratio/max", "mismatch/kl"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name


def test_metrics_do_not_depend_on_the_cut():
    found, whole = {}, {}
    through_trl(MEASURED, 4, metrics=found)
    through_trl(MEASURED, 1, metrics=whole)
    same_metrics(found, whole)


def test_two_processes(tmp_path):
    """DDP on gloo; all cases, with accumulation 1 or 4, and what else needs two processes, in one launch."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a port that nobody else can take
    base = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    base |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    base |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    running = [
        subprocess.Popen(
            [sys.executable, TESTS / "integrations" / "trl_fixed.py", tmp_path / "rank"],
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in running:
            text = process.communicate(timeout=300)[0]
            assert process.returncode == 0, text
    finally:
        for process in running:
            process.kill()
    alone: dict[str, float] = {}
    through_trl(MEASURED, 1, metrics=alone)
    penalised = overlong(1)
    for found in (torch.load(tmp_path / f"rank{rank}") for rank in range(2)):
        assert len(found["steps"]) == len(IN_TWO)
        for case, accumulation in IN_TWO:
            same(found["steps"][label(case), accumulation], expected(label(case)), tolerance(case))
        same_metrics(found["metrics"], alone)
        same(found["overlong"], penalised)
        assert found["resumed"]
