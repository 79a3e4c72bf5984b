"""verl loads the plugin by itself and says so; a run that cannot work is refused before Ray starts."""

import os
import subprocess
import sys

import pytest

from engine_verl.verl_engine import needs_verl

pytestmark = needs_verl

LOADED = "is loaded into verl 0.9"
OLD = """
import importlib.metadata as m
found = m.version
m.version = lambda name: "0.8.0" if name == "verl" else found(name)
"""
SCRIPTS = {
    "bare": "import verl; from verl.trainer.ppo import core_algos as c; print(*c.POLICY_LOSS_REGISTRY)",
    "inside": "import verl.trainer.ppo.core_algos as c; print(*c.ADV_ESTIMATOR_REGISTRY)",
    "old": OLD + "import verl; from verl.trainer.ppo import core_algos as c; print(*c.POLICY_LOSS_REGISTRY)",
}
MAIN = ["-m", "verl.trainer.main_ppo", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
MAIN += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.name=vllm"]
MAIN += ["actor_rollout_ref.actor.policy_loss.loss_mode=rpg-reinforce-urkl"]
MAIN += ["+actor_rollout_ref.actor.policy_loss.rpg.beta=1e-3", "+actor_rollout_ref.actor.policy_loss.rpg.hihg=0.3"]


@pytest.fixture(scope="module")
def processes():
    commands = {name: ["-c", text] for name, text in SCRIPTS.items()} | {"main": MAIN}
    started = {
        name: subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, command in commands.items()
    }
    return {name: (*p.communicate(timeout=600), p.returncode) for name, p in started.items()}


@pytest.mark.parametrize("how", ["bare", "inside"])
def test_verl_loads_it_and_one_line_says_so(processes, how):
    _, err, code = processes[how]
    assert code == 0, err
    assert err.count(LOADED) == 1


def test_presets_have_their_names_and_verl_keeps_its_own(processes):
    found = processes["bare"][0].split()
    assert {"rpg-reinforce-urkl", "grpo-corrected", "rpg:grpo-corrected", "rpg:gspo", "gspo"} <= set(found)
    estimators = processes["inside"][0].split()
    assert {"rpg:leave-one-out", "rpg:reinforce++", "grpo"} <= set(estimators)
    assert "rpg:greedy-baseline" not in estimators


def test_another_version_of_verl_is_named_and_verl_goes_on(processes):
    out, err, code = processes["old"]
    assert code == 0, err
    assert "rpg is NOT loaded into verl: verl 0.8.0 is installed; rpg.integrations.verl was tested with verl" in err
    assert "rpg-reinforce-urkl" not in out.split()


def test_a_mistyped_option_stops_main_ppo_with_the_nearest_name(processes):
    _, err, code = processes["main"]
    assert code != 0
    assert "unknown option of 'rpg-reinforce-urkl' 'hihg'. Did you mean 'high'?" in err
