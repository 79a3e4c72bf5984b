"""verl loads the plugin by itself and says so; a run that cannot work is refused before Ray starts."""

import json
import os
import subprocess
import sys

import pytest

from engine_verl.verl_engine import TESTS, needs_verl

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
MAIN = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.name=vllm"]
MAIN += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1"]
MAIN += ["actor_rollout_ref.actor.policy_loss.loss_mode=rpg-reinforce-urkl"]
MAIN += ["+actor_rollout_ref.actor.policy_loss.rpg.beta=1e-3", "+actor_rollout_ref.actor.policy_loss.rpg.hihg=0.3"]
SCRIPTS["main"] = f"""
import runpy, sys
sys.argv[1:] = {MAIN!r}
runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
"""
ASYNC = ["data.train_batch_size=0", "actor_rollout_ref.hybrid_engine=False"]
ASYNC += ["actor_rollout_ref.actor.policy_loss.loss_mode=rpg-reinforce-urkl"]
DRIVER = f"""
import runpy, sys
sys.path.insert(0, {str(TESTS)!r})
import engine_verl.no_servers
import verl.trainer.main_ppo as main_ppo
main_ppo.run_ppo = lambda config, **_: print(config.algorithm.adv_estimator, config.critic.enable)
runpy.run_module("verl.experimental.fully_async_policy.fully_async_main", run_name="__main__", alter_sys=True)
"""
SCRIPTS["async"] = f"import sys; sys.argv[1:] = {ASYNC!r}\n{DRIVER}"
STALE = [*ASYNC, "algorithm.rollout_correction.bypass_mode=False"]
SCRIPTS["stale"] = f"import sys; sys.argv[1:] = {STALE!r}\n{DRIVER}"
FORKS = """
import json, os, sys
import datasets, hydra, ray, tensordict, torch, transformers  # once for all; verl is each one's own to import
folder, scripts = sys.argv[1], json.loads(sys.argv[2])
for name, text in scripts.items():
    if not (child := os.fork()):
        for number, end in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}.{end}", os.O_WRONLY | os.O_CREAT), number)
        exec(compile(text, name, "exec"), {"__name__": "__main__"})
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    open(f"{folder}/{name}.code", "w").write(str(code))
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    subprocess.run(
        [sys.executable, "-c", FORKS, str(folder), json.dumps(SCRIPTS)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "0"},
        cwd=folder,
        check=True,
        timeout=600,
    )

    def read(name, end):
        return (folder / f"{name}.{end}").read_text()

    return {name: (read(name, "out"), read(name, "err"), int(read(name, "code"))) for name in SCRIPTS}


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
    assert "ValueError: unknown option of 'rpg-reinforce-urkl' 'hihg'. Did you mean 'high'?" in err
    assert "Error in call to target" not in err, "hydra's three lines"


def test_the_fully_asynchronous_program_has_the_presets_advantage_before_ray_starts(processes):
    out, err, code = processes["async"]
    assert code == 0, err
    assert "rpg:rpg-reinforce-urkl False" in out.splitlines()


def test_the_fully_asynchronous_program_is_refused_where_the_gradient_would_be_biased(processes):
    _, err, code = processes["stale"]
    assert code != 0
    assert "ValueError: async_training: responses come from earlier weights than old_log_probs" in err
