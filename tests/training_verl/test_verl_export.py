"""What rpg export verl writes, inside verl: run.sh of the built-in recipe, on a CPU. Part of `make test-verl`.

Whatever the machine lacks for it follows run.sh as further settings; all that is the recipe's is run.sh's own.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

if not all(importlib.util.find_spec(name) for name in ("verl", "vllm")):
    pytest.skip("verl with vLLM has an environment of its own: make test-verl", allow_module_level=True)

import psutil
import torch
import transformers
import verl_run
from safetensors.torch import load_file

from rpg.cli import main
from rpg.run.config import Config
from rpg.run.settings import build
from rpg.tasks import load_task
from rpg.training.optim import learning_rate
from rpg.training.setup import make_scorer

RECIPE = Path(__file__).parents[2] / "recipes" / "builtin" / "rpg-urkl.yaml"
STEPS, PROMPTS, SAMPLES, MINIBATCHES = 2, 8, 4, 2
FLAGS = {
    "steps": STEPS,
    "dtype": "float32",
    "rollout.prompts": PROMPTS,
    "rollout.samples": SAMPLES,
    "optim.minibatches": MINIBATCHES,
    "optim.recompute": "false",
    "optim.warmup": 3,
    "optim.schedule": "cosine",
    "task.rewards.correct": 1,
    "task.rewards.len.py:shorter": 0.25,
    "eval.problems": 4,
    "eval.k": 1,
    "log.tensorboard": "false",
}
OWN = ("max_model_len", "tensor_model_parallel_size", "enable_gradient", "actor.strategy", "rollout.name")
SHORTER = "def shorter(response, answer, prompt):\n    return 1 / (1 + len(response))\n"


def small_machine(folder):
    """Of verl_run's settings those that a machine without a GPU needs; what run.sh has set itself stays."""
    every = verl_run.settings(folder, STEPS)
    return [one for one in every[every.index("trainer.device=cpu") :] if not any(name in one for name in OWN)]


def run(script, folder):
    """bash run.sh with more settings, to its end; its log."""
    more = ["data.dataloader_num_workers=0", f"trainer.rollout_data_dir={folder}/rollouts"]
    extra = [*small_machine(folder), *more, "trainer.logger=[console,file]", "trainer.save_freq=1"]
    env = verl_run.environment(folder, "numbers")
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    log, ours = folder / "log.txt", {}
    with log.open("w") as out:
        verl = subprocess.Popen(["bash", script, *extra], env=env, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        end = time.monotonic() + 1200
        try:
            while verl.poll() is None and time.monotonic() < end and not verl_run.FATAL.search(log.read_text()):
                ours |= {p.pid: p for p in psutil.Process().children(recursive=True)}
                time.sleep(1)
        finally:
            verl.kill()
            verl.wait()
            for process in ours.values():  # Ray's too
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    assert verl.returncode == 0, log.read_text()[-6000:]
    return log.read_text()


def rollouts(folder, step):
    rows = [json.loads(line) for line in (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
    return [row | {"input": row["input"].strip()} for row in rows]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    (folder / "len.py").write_text(SHORTER)
    out = folder / "lr=1e-3, it's (2)"
    with contextlib.chdir(folder):
        flags = [f"--{name}={value}" for name, value in FLAGS.items()]
        assert main(["export", "verl", str(RECIPE), "-o", str(out), "--gpus", "1", *flags]) == 0
        config = build(Config, file=RECIPE, flags=FLAGS)
    return out, folder, config, run(out / "run.sh", folder)


def test_the_problems_are_those_of_the_task_in_its_order(exported):
    _, folder, *_ = exported
    problems = load_task("arithmetic", 0).train[: STEPS * PROMPTS]
    for step in range(STEPS):
        given = [row["input"] for row in rollouts(folder, step + 1)]
        want = [problem.prompt.strip() for problem in problems[step * PROMPTS : (step + 1) * PROMPTS]]
        assert sorted(given) == sorted(want * SAMPLES)


def test_rewards_are_those_of_rpg_train(exported):
    """reward.py inside Ray's workers, with the user's own file beside it."""
    _, folder, config, _ = exported
    rows = [row for step in range(STEPS) for row in rollouts(folder, step + 1)]
    with contextlib.chdir(folder), make_scorer(config, load_task("arithmetic", 0)) as scorer:
        want = scorer.score([(row["output"], row["gts"], row["input"]) for row in rows])
    assert [row["score"] for row in rows] == pytest.approx(want.values)
    assert len(set(want.values)) > 8
    assert 0 < sum(want.solved) < len(rows)


def weights(out, step):
    at = out / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface" if step else out / "model"
    return load_file(at / "model.safetensors")


def test_each_optimiser_step_has_the_learning_rate_of_rpg_train(exported):
    """ScheduledAdamW under FSDP2. After two steps of AdamW w2 − w0 = −a·sign(g1) − b·u2 with the rates a and b, and u2
    is in the moments: what is left of the way without b·u2 is a, in every weight."""
    out, folder, config, _ = exported
    (path,) = out.glob("checkpoints/global_step_1/actor/optim_*.pt")
    saved = torch.load(path, weights_only=False)
    (group,), (low, high) = saved["param_groups"], config.optim.betas
    first, second = (learning_rate(config.optim, step, STEPS * MINIBATCHES) for step in range(2))
    before, after = weights(out, 0), weights(out, 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    left = []
    for number, (name, _) in enumerate(model.named_parameters()):
        state = saved["state"][number]
        assert int(state["step"]) == MINIBATCHES
        mean, square = (state[key].to_local() for key in ("exp_avg", "exp_avg_sq"))
        moved = mean / (1 - low**2) / ((square / (1 - high**2)).sqrt() + group["eps"])
        left.append((after[name] - before[name] + second * moved).abs()[square > 1e-12])
    left_P = torch.cat(left)
    assert len(left_P) > 500_000
    assert left_P.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist() == pytest.approx([first] * 3, rel=0.02)
    assert first < second < config.optim.lr == verl_run.metrics(folder)[1]["actor/lr"], "verl logs the peak"


def test_it_trains_the_builtin_model_and_evaluates(exported):
    out, folder, *_ = exported
    before, after = weights(out, 0), weights(out, STEPS)
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    found = verl_run.metrics(folder)
    assert sorted(found) == list(range(STEPS + 1))
    assert found[STEPS]["actor/rpg/kl/old"] > 0
    for step in (0, STEPS):
        assert 0 <= found[step]["val-core/arithmetic/acc/mean@1"] <= 1
