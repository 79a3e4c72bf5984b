"""``import rpg`` costs torch and nothing else."""

import json
import subprocess
import sys

HEAVY = ("transformers", "trl", "datasets", "liger_kernel", "verl", "rich", "scipy", "pandas", "matplotlib", "sympy")
PROGRAM = f"""
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import rpg
seconds = time.perf_counter() - start
added = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(json.dumps([seconds, sorted(added & set({HEAVY!r})), sorted(n for n in {HEAVY!r} if n in sys.modules)]))
"""


def test_import_is_light_and_fast():
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    assert [added for _, added, _ in runs] == [[], []]
    loaded = set(runs[0][2])
    assert not loaded & {"transformers", "trl", "datasets", "liger_kernel", "verl", "rich", "scipy"}
    assert min(seconds for seconds, _, _ in runs) < 1.0


def test_public_names():
    import rpg

    for name in ("PolicyLoss", "clip", "algorithm", "algorithms", "audit", "mismatch", "Advantage", "LossOutput"):
        assert name in rpg.__all__
    for name in rpg.__all__:
        assert hasattr(rpg, name)
    assert [round(x, 4) for x in rpg.clip.KL3(delta=0.05, form="k3").bounds()] == [0.7162, 1.3504]
    assert rpg.__version__
