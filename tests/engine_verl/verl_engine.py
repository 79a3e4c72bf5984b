"""One batch through verl's own FSDP2 engine on a CPU: its model pass, micro-batches, denominators, averaged gradients.

`Job` runs this file as a script, once a rank: verl settles its platform when it is first imported.
"""

import copy
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from contextlib import closing
from functools import cache, partial
from pathlib import Path

import pytest

import rpg

needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl has an environment of its own: make test"
)
REFUSED = {"warp", *(name for name in rpg.algorithms() if rpg.algorithm(name).only_here)}  # warp: a moving average
TESTS = Path(__file__).resolve().parent.parent
ON_CPU = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "training_verl.cpu_platform", "OMP_NUM_THREADS": "1"}


def environment(**more):
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    return os.environ | ON_CPU | {"PYTHONPATH": path} | {k: str(v) for k, v in more.items()}


SAME = ("theta0", "theta", "theta_ref", "rollout_logp")  # of every Case


def sharing(cases):
    """The same cases, which take long to make, with what is the same for all made once."""
    for case in cases[1:]:
        vars(case).update({name: getattr(cases[0], name) for name in SAME})
    return cases


class Job:
    """``shapes``: (processes, accumulation). Gives (loss, gradients, metrics) by case and shape, [(i, *shape)]."""

    def __init__(self, folder, cases, shapes):
        self.out, given = Path(folder) / "out", Path(folder) / "in"
        given.write_bytes(pickle.dumps((cases, shapes)))
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(given), str(self.out)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def results(self):
        log = self.process.communicate(timeout=900)[0]
        assert self.process.returncode == 0, log[-4000:]
        return pickle.loads(self.out.read_bytes())


def free_port():
    with closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- in the worker ---------------------------------------------------------------------------------------------------


@cache
def defaults():
    """verl's own, and the few that it wants to be given."""
    import verl
    from hydra import compose, initialize_config_dir

    micro = ["actor.ppo_micro_batch_size_per_gpu", "rollout.log_prob_micro_batch_size_per_gpu"]
    given = [f"actor_rollout_ref.{name}=1" for name in [*micro, "ref.log_prob_micro_batch_size_per_gpu"]]
    given += ["actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=1"]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", given)


def run_config(overrides):
    """The settings of a run, which verl has validated, the plugin's checks included."""
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    base = copy.deepcopy(defaults())
    OmegaConf.set_struct(base, False)
    config = OmegaConf.merge(base, OmegaConf.from_dotlist([text.removeprefix("+") for text in overrides]))
    validate_config(config, use_reference_policy=False, use_critic=False)
    return config


def prepared(case):
    """A case's settings and actor config."""
    from verl.utils.config import omega_conf_to_dataclass

    config = run_config(overrides_of(case))
    return case, config, omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def overrides_of(case, mode="rpg:"):
    """What a user writes for this case."""
    from rpg.integrations.verl.settings import ACTOR, OPTIONS, settings, wanted

    options = {} if case.reference == "auto" else {"reference.update": case.reference}
    for name, value in case.options.items():
        options |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    nested = dict(case.options) | ({} if case.reference == "auto" else {"reference": {"update": case.reference}})
    found = wanted(settings(case.name, nested)) | {"actor_rollout_ref.actor.policy_loss.loss_mode": mode + case.name}
    if case.method.loss.reduction == "constant":
        found[f"{ACTOR}.loss_scale_factor"] = int(case.method.loss.constant)
    if case.old == "sampler":
        found["algorithm.rollout_correction.bypass_mode"] = True
    return [f"{k}={v}" for k, v in found.items()] + [f"+{OPTIONS}.{k}={v}" for k, v in options.items()]


def advantages_of(case, config):
    """verl's estimator on verl's rewards, [B,T], as its trainer calls it."""
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, kl_penalty

    batch, algorithm = case.batch, config.algorithm
    mask_BT = batch.mask_BT
    last_BT = mask_BT & (mask_BT.flip(-1).cumsum(-1).flip(-1) == 1)
    rewards_BT = last_BT * batch.reward_B.unsqueeze(-1)
    if algorithm.use_kl_in_reward:
        kl_BT = kl_penalty(batch.old_logp_BT, reference_logp(case), algorithm.kl_penalty)
        rewards_BT = rewards_BT - algorithm.kl_ctrl.kl_coef * kl_BT * mask_BT
    more = {}
    if algorithm.adv_estimator == "remax":
        more["reward_baselines"] = torch.tensor(case.greedy_rewards)[batch.group_B]
    uid = np.array([f"prompt-{int(g)}" for g in batch.group_B], dtype=object)
    fn = get_adv_estimator_fn(algorithm.adv_estimator)
    return fn(token_level_rewards=rewards_BT, response_mask=mask_BT.float(), index=uid, config=algorithm, **more)[0]


def reference_logp(case):
    return case.batch.ref_logp_BT if case.has_reference else _reference_logp()


@cache
def _reference_logp():
    """The same for every case, though none but those with a reference has it in its batch."""
    from integrations.equivalence import Case
    from rpg.training.reference import batch_logp

    case = Case("reinforce")
    return batch_logp(case.policy(case.theta_ref), case.batch, 1024)


def tensordict(case, config, rows, accumulation):
    """These rows as verl's trainer hands them to the actor."""
    import torch
    from verl.utils import tensordict_utils as tu

    batch, prompts = case.batch, [case.prompts[int(g)] for g in case.batch.group_B]
    lengths = [int(n) for n in batch.mask_BT.sum(-1)]

    def ragged(lists):
        return torch.nested.as_nested_tensor([torch.as_tensor(x) for x in lists], layout=torch.jagged)

    def of(x_BT):
        return ragged([x_BT[i, : lengths[i]] for i in rows])

    whole = [prompts[i] + case.responses[i] for i in rows]
    tensors = {
        "input_ids": ragged(whole),
        "position_ids": ragged([list(range(len(x))) for x in whole]),
        "prompts": ragged([prompts[i] for i in rows]),
        "responses": ragged([case.responses[i] for i in rows]),
        "response_mask": ragged([[1] * lengths[i] for i in rows]),
        "loss_mask": ragged([[0] * len(prompts[i]) + [1] * lengths[i] for i in rows]),
        "old_log_probs": of(batch.old_logp_BT),
        "advantages": of(advantages_of(case, config)),
    }
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        tensors["rollout_log_probs"] = ragged([torch.tensor(case.rollout_logp[i]) for i in rows])
    if config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        tensors["ref_log_prob"] = of(reference_logp(case))
    plain = {
        "temperature": case.config.rollout.temperature,
        "global_batch_size": len(batch),
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(rows) // accumulation,
        "use_remove_padding": False,
        "use_fused_kernels": False,
        "calculate_entropy": True,
    }
    return tu.get_tensordict(tensors, plain)


def make_engine(folder):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    full = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=folder,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, use_remove_padding=False, mixed_precision=full),
        FSDPOptimizerConfig(lr=0.0),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def one(engine, made, accumulation, rank, ranks):
    import torch
    from verl.utils.metric import Metric
    from verl.workers.utils.losses import ppo_loss

    case, config, actor = made
    data = tensordict(case, config, range(rank, len(case.batch), ranks), accumulation)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(data, partial(ppo_loss, config=actor))
        gradients = {name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters()}
    loss, metrics = torch.tensor(out["loss"]).sum(), [None] * ranks
    torch.distributed.all_reduce(loss)
    torch.distributed.all_gather_object(metrics, out["metrics"])
    names = [name for name in metrics[0] if name.startswith("actor/rpg/")]
    return float(loss) / ranks, gradients, {name: Metric.aggregate_dp([m[name] for m in metrics]) for name in names}


def work(folder, made, rank, ranks, accumulations, port, out):
    """A rank: all cases through one engine, whose weights never change."""
    import torch

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo")
    engine = make_engine(folder)
    found = {(i, ranks, a): one(engine, x, a, rank, ranks) for a in accumulations for i, x in enumerate(made)}
    if rank == 0:
        Path(f"{out}-{ranks}").write_bytes(pickle.dumps(found))
    torch.distributed.destroy_process_group()


def main(given, out):
    """Imports and cases once, then a fork for every rank."""
    import multiprocessing

    import verl
    import verl.workers.engine.fsdp.transformer_impl  # noqa: F401

    import tiny

    cases, shapes = pickle.loads(Path(given).read_bytes())
    made = [prepared(case) for case in sharing(cases)]
    for case, config, _ in made:
        advantages_of(case, config)  # and with it the batch
    with tempfile.TemporaryDirectory() as folder:
        cases[0].model(cases[0].theta).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
        fork, worlds = multiprocessing.get_context("fork"), sorted({ranks for ranks, _ in shapes})
        ranks = []
        for size in worlds:
            shared = (size, [a for r, a in shapes if r == size], free_port(), out)
            ranks += [fork.Process(target=work, args=(folder, made, rank, *shared)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(1)
    parts = [pickle.loads(Path(f"{out}-{size}").read_bytes()) for size in worlds]
    Path(out).write_bytes(pickle.dumps({key: value for part in parts for key, value in part.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
