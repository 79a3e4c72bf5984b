"""``import rpg`` costs torch and nothing else."""

import json
import os
import subprocess
import sys

HEAVY = ("transformers", "trl", "datasets", "liger_kernel", "verl", "rich", "scipy", "pandas", "matplotlib", "sympy")
PROGRAM = f"""
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import rpg
seconds = time.process_time() - start
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

    public = {"PolicyLoss", "clip", "algorithm", "algorithms", "audit", "mismatch", "Advantage", "LossOutput"}
    public |= {"train", "evaluate", "Run"}
    assert public <= set(rpg.__all__) <= set(dir(rpg))
    for name in rpg.__all__:
        assert hasattr(rpg, name)
    assert [round(x, 4) for x in rpg.clip.KL3(delta=0.05, form="k3").bounds()] == [0.7162, 1.3504]
    assert rpg.__version__


def test_train_is_a_function_whatever_was_imported_before():
    program = """
import rpg.training.loop, rpg.training.evaluate, rpg.commands.train, rpg.commands.evaluate, rpg.api
import rpg
from rpg import Run, evaluate, train
assert rpg.train is train is rpg.api.train and rpg.evaluate is evaluate is rpg.api.evaluate and rpg.Run is Run
assert rpg.training.loop.train is not train
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_clips_and_mismatch_rules_can_be_imported_by_their_public_names():
    import rpg.clip
    import rpg.mismatch
    from rpg.clip import RPGClip
    from rpg.loss import clip, mismatch
    from rpg.mismatch import TIS

    assert (RPGClip, TIS) == (clip.RPGClip, mismatch.TIS)
    for public, home, base in ((rpg.clip, clip, clip.Clip), (rpg.mismatch, mismatch, mismatch.Mismatch)):
        rules = {name for name, x in vars(home).items() if isinstance(x, type) and issubclass(x, base)}
        assert rules <= set(public.__all__)


def test_the_command_lets_threads_sleep_before_torch_is_loaded():
    program = (
        "import contextlib, io, os, sys\n"
        "from rpg.cli import main\n"
        "assert 'torch' not in sys.modules  # which reads it once\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    main([])\n"
        "print(os.environ.get('GOMP_SPINCOUNT'))\n"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    for own, expected in (({}, "500"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")):
        run = [sys.executable, "-c", program]
        done = subprocess.run(run, env=clean | own, capture_output=True, text=True, check=True)
        assert done.stdout == f"{expected}\n"
