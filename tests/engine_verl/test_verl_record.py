"""A batch that verl's FSDP2 engine records, replayed: the gradient, loss and metrics of that optimiser step."""

import pickle
import subprocess
import sys

import pytest

from engine_verl.verl_engine import environment, free_port, needs_verl, overrides_of, run_config
from integrations.equivalence import Case
from rpg.models.policy import Policy
from rpg.recorded.layout import read
from rpg.replay import model_of, replay

pytestmark = needs_verl

CASES = [
    Case("rpg-reinforce-urkl", {"beta": 0.1}, reference="frozen"),
    Case("gspo"),
    Case("grpo", {"mismatch": "exact"}),
    Case("dr-grpo", {"constant": 7.0}),
    Case("reinforce++"),
]
ACCUMULATION = 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What the engine gave for each case: the norm that its step returns, and its loss."""
    folder = tmp_path_factory.mktemp("verl")
    (folder / "in").write_bytes(pickle.dumps(CASES))
    done = subprocess.run(
        [sys.executable, __file__, folder, str(free_port())], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder, pickle.loads((folder / "out").read_bytes())


@pytest.mark.parametrize("i", range(len(CASES)), ids=[case.name for case in CASES])
def test_a_replay_has_what_verl_measured(recorded, i):
    folder, found = recorded
    path = folder / f"{i}.safetensors"
    batch = read(path)
    done = replay(batch, Policy.load(model_of(batch, path)), ["rloo"])
    norm, loss, metrics = found[i]
    assert batch.measured["grad_norm"] == pytest.approx(norm)
    assert done.ran.grad_norm == pytest.approx(norm, rel=1e-5)
    assert done.ran.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    for name in ("kl/old", "ratio/max", "entropy_sampled", *(["kl/ref"] if "kl/ref" in done.ran.metrics else [])):
        assert done.ran.metrics[name] == pytest.approx(metrics[f"actor/rpg/{name}"], rel=1e-5, abs=1e-7), name
    assert batch.groups == 4
    given = "reward_of" not in batch.about
    assert given == (i % 2 == 0)  # where verl hands the rewards on, they are in the file
    assert given != any("stand for them" in note for note in done.notes)
    assert batch.reward_B.tolist() == CASES[i].rewards or not given


def test_what_cannot_be_recorded_is_refused():
    option = "+actor_rollout_ref.actor.policy_loss.rpg"
    with pytest.raises(ValueError, match="record_step a number from 1"):
        run_config([*overrides_of(Case("gspo")), f"{option}.record=x", f"{option}.record_step=0"])


# ---- in the worker ---------------------------------------------------------------------------------------------------


def work(folder, port):
    """Every case is the first or the second optimiser step of this process that is recorded."""
    import os
    from functools import partial
    from pathlib import Path

    import torch
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.metric import Metric
    from verl.workers.utils.losses import ppo_loss

    import tiny
    from engine_verl.verl_engine import make_engine, sharing, tensordict

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.distributed.init_process_group("gloo")
    folder, found = Path(folder), []
    cases = sharing(pickle.loads((folder / "in").read_bytes()))
    cases[0].model(cases[0].theta).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    engine = make_engine(str(folder / "model"))
    for i, case in enumerate(cases):
        option = "+actor_rollout_ref.actor.policy_loss.rpg"
        record = [f"{option}.record={folder / f'{i}.safetensors'}", f"{option}.record_step={i + 1}"]
        config = run_config([*overrides_of(case), *record])
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        data = tensordict(case, config, range(len(case.batch)), ACCUMULATION)
        if i % 2 == 0:
            last = [torch.zeros(int(n)) for n in case.batch.mask_BT.sum(-1)]
            for row, reward in zip(last, case.rewards, strict=True):
                row[-1] = reward
            data["token_level_rewards"] = torch.nested.as_nested_tensor(last, layout=torch.jagged)
        tu.assign_non_tensor(data, disable_auto_offload=True)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            out = engine.forward_backward_batch(data, partial(ppo_loss, config=actor))
            norm = engine.optimizer_step()
        metrics = {
            name: Metric.aggregate_dp([value])
            for name, value in out["metrics"].items()
            if name.startswith("actor/rpg/")
        }
        found.append((float(norm), float(torch.tensor(out["loss"]).sum()), metrics))
    (folder / "out").write_bytes(pickle.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    work(*sys.argv[1:])
