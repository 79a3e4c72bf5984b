"""RPGAsyncTrainer: TRL's real asynchronous trainer on a CPU, with responses that are already in its queue."""

import queue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

pytest.importorskip("trl")

from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import rpg
import tiny
from integrations.equivalence import TEMPERATURE, Case, same, through_rpg_train
from integrations.trl_fixed import Look
from rpg.integrations.trl.async_trainer import RPGAsyncTrainer


class Sampled:
    """The responses of a case, in the place of TRL's worker, which would ask a vLLM server for them."""

    def __init__(self, case):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for i, response in list(enumerate(case.responses)) * 4:  # accelerate reads ahead
            group = int(case.batch.group_B[i])
            prompt = case.prompts[group]
            sample = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.array(prompt + response),
                completion_mask=np.array([0] * len(prompt) + [1] * len(response)),
                old_log_probs=np.array([0.0] * len(prompt) + case.rollout_logp[i], dtype=np.float32),
                advantage=float(case.batch.advantage[i]),
                model_version=0,
                group_id=group,
                metrics={"reward": case.rewards[i]},
            )
            self.rollout_buffer.put(sample)

    def start(self): ...

    def stop(self): ...

    def update_model_version(self, model_version): ...

    def check_health(self, stale_after_s): ...


class NoTransfer:
    """Nobody samples, so no weights are sent."""

    def init_weight_transfer(self): ...

    def pause(self): ...

    def send_weights(self, iterator): ...

    def resume(self): ...

    def destroy(self): ...


def attention_on_a_cpu(query, key, value, starts_q, starts_k, longest_q, longest_k, softmax_scale, **_):
    """What TRL's kernel computes: each segment after its own path, causally, aligned at the end. [tokens, heads, F]"""
    out = []
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        q, k, v = query[q0:q1].transpose(0, 1), key[k0:k1].transpose(0, 1), value[k0:k1].transpose(0, 1)
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        may = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, may, scale=softmax_scale)
        out.append(seen.transpose(0, 1))
    return torch.cat(out)


@pytest.fixture
def through_trl(tmp_path, monkeypatch):
    kernel = SimpleNamespace(flash_attn_varlen_func=attention_on_a_cpu)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # asks for a GPU's name

    def run(case, algorithm=None, **settings):
        case.model(case.theta).save_pretrained(tmp_path / "model")
        tiny.tokenizer().save_pretrained(tmp_path / "model")
        usual = {
            "use_cpu": True,
            "bf16": False,
            "dtype": "float32",
            "gradient_checkpointing": False,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "temperature": TEMPERATURE,
            "per_device_train_batch_size": len(case.responses),
            "token_budget": 0,
            "max_steps": 1,
            "learning_rate": 0.0,
            "max_grad_norm": 0.0,
        }
        look = Gradients()
        look.trainer = RPGAsyncTrainer(
            str(tmp_path / "model"),
            args=AsyncGRPOConfig(str(tmp_path / "out"), **(usual | settings)),
            train_dataset=Dataset.from_dict({"prompt": ["w2"]}),
            algorithm=algorithm or rpg.algorithm(case.name, **case.options),
            callbacks=[look],
            rollout_worker=Sampled(case),
            weight_transfer=NoTransfer(),
        )
        look.trainer.train()
        return look

    return run


class Gradients(Look):
    """With the metrics that RPGAsyncTrainer left among TRL's."""

    def on_pre_optimizer_step(self, *args, **kwargs):
        metrics, self.trainer._means = dict(self.trainer._metrics["train"]), SimpleNamespace(result=dict)
        super().on_pre_optimizer_step(*args, **kwargs)
        self.metrics = metrics


@pytest.mark.parametrize("name", ["rpg-reinforce-urkl", "rpg-ufkl", "dapo", "gspo", "dr-grpo", "cispo"])
def test_the_gradient_is_that_of_what_each_token_was_drawn_from(through_trl, name):
    options = {"constant": 12.0} if name == "dr-grpo" else {}
    case = Case(name, options, old="sampler")
    found = through_trl(case)
    same((float(found.loss), found.gradients), through_rpg_train(case))
    ((total, tokens),) = found.metrics["rpg/kl/old"]
    assert tokens == int(case.batch.mask_BT.sum())
    assert total > 0
    assert found.metrics["clip_ratio/low_mean"], "TRL's own metrics are still there"


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("grpo", 'no reference is held: rpg.algorithm(…, reference="old")'),
        ("reinforce++", "it has a KL in the reward"),
        ("rloo", "it has no ratio that accounts for them"),
        ("remax", "its baseline is the reward of a greedy response"),
        ("capo", "its gate needs logits"),
        (rpg.algorithm("dapo", mismatch=rpg.mismatch.TIS()), "a mismatch rule has nothing to compare"),
        (rpg.algorithm("dapo", clip=rpg.clip.Adaptive(target_kl=0.1)), "it is fitted to the whole optimiser step"),
    ],
)
def test_refused_in_one_line(algorithm, said):
    with pytest.raises(ValueError, match="cannot run in TRL's asynchronous trainer: ") as error:
        RPGAsyncTrainer("no model is loaded", algorithm=algorithm)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_bounds_in_trls_words_are_refused(through_trl):
    with pytest.raises(ValueError, match=r"epsilon_high is decided by the algorithm here: give rpg\.algorithm"):
        through_trl(Case("dapo"), epsilon_high=0.3)
