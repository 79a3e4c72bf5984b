"""The batch of equivalence.py through a real RPGTrainer: TRL is given the responses, and everything after is its own.

Run as a program it is one process of several: python trl_fixed.py OUTPUT, with RANK, WORLD_SIZE, … set.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

import tiny
from integrations.equivalence import GROUPS, LONGEST, SAMPLES, TEMPERATURE, Case, preset_case
from rpg.integrations.trl import RPGConfig, RPGTrainer
from rpg.loss.methods import algorithm, algorithms
from rpg.loss.mismatch import Mismatch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
gc.freeze()  # accelerate collects garbage when a training starts: all that was imported need not be looked at
REFUSED = ("remax", *(name for name in algorithms() if algorithm(name).only_here))
OTHERS = [
    Case("rpg-reinforce-urkl", reference="frozen"),
    Case("rpg-fkl", {"beta": 0.1}, reference="frozen"),
    Case("rpg-urkl", {"beta": 0.1, "kl_to_go": True}, reference="frozen"),
    Case("grpo-corrected", {"level": "sequence"}),
    Case("dapo", {"mismatch": "tis"}),
    Case("gspo", {"mismatch": "mis"}),
    Case("cispo", {"mismatch": "sequence-mask"}),
    Case("reinforce++", {"beta": 0.3}),
    Case("rloo", {"advantage": {"beta": 0.3}}),
    Case("grpo", {"advantage": {"kind": "batch-mean", "beta": 0.2}}),
]
MEASURED = Case("rpg-reinforce-urkl", reference="frozen")  # whose metrics are looked at
CASES = [*(preset_case(name) for name in algorithms() if name not in REFUSED), *OTHERS]
# What two processes run: every case once, cut into 1 and 4 parts in turn; RPG_TRL=all: every case both ways.
IN_TWO = [(case, (1, 4)[i % 2]) for i, case in enumerate(CASES)]
if os.environ.get("RPG_TRL") == "all":
    IN_TWO = list(itertools.product(CASES, (1, 4)))


def weighed(case: Case) -> Case:
    """With the rule that RPGTrainer takes where none is given, since the sampler's log-probabilities are known here."""
    if "mismatch" in case.options:
        return case
    rule = Mismatch("sequence") if case.options.get("kl_to_go") else "exact"
    made = replace(case, options={**case.options, "mismatch": rule})
    vars(made).update({name: x for name, x in vars(case).items() if name in ("theta", "rollout_logp")})
    return made


def label(case: Case) -> str:
    return " ".join([case.name, *(f"{k}={v}" for k, v in case.options.items()), case.reference])


def config(folder: str, **settings: Any) -> RPGConfig:
    """Small, on the CPU, in float32, silent."""
    usual = {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "shuffle_dataset": False,
    }
    return RPGConfig(**(usual | settings))


class Moved(RPGTrainer):
    """Between the generation and the optimiser step the weights move from theta0 to theta."""

    case: Case

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self.model.load_state_dict(self.case.theta)
        return batch


class Look(TrainerCallback):
    """Keeps the gradients of one optimiser step, and ends the training there."""

    def __init__(self, step: int = 1) -> None:
        self.step, self.before = step, 0.0
        self.gradients: dict[str, Tensor] = {}
        self.loss = torch.tensor(0.0)
        self.metrics: dict[str, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 < self.step:
            self.before = self.trainer._tr_loss.clone()
            return
        named = self.trainer.model.named_parameters()
        self.gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for n, p in named}
        self.loss = self.trainer.accelerator.gather((self.trainer._tr_loss - self.before).reshape(1)).mean()
        self.metrics = self.trainer._means.result()
        control.should_training_stop = True


def through_trl(
    case: Case,
    accumulation: int,
    *,
    groups: Sequence[int] = range(GROUPS),
    rewards: Sequence[float] | None = None,
    env_mask: list[list[int]] | None = None,
    step: int = 1,
    metrics: dict[str, float] | None = None,
    **settings: Any,
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of an optimiser step, over all processes.

    ``groups``: those in the dataset. ``metrics`` takes the step's.
    """
    texts = [tiny.text(prompt) for prompt in case.prompts]
    reward_of = {tuple(r): reward for r, reward in zip(case.responses, rewards or case.rewards, strict=True)}
    assert len(reward_of) == len(case.responses)

    def rollout(prompts: list[str], trainer: RPGTrainer) -> dict[str, Any]:
        first = trainer.accelerator.process_index * len(prompts)  # of this process's rows among all
        rows = [texts.index(prompt) * SAMPLES + (first + i) % SAMPLES for i, prompt in enumerate(prompts)]
        size = min(SAMPLES, len(prompts))
        assert prompts == [prompt for prompt in prompts[::size] for _ in range(size)]  # whole groups, or one's part
        found = {
            "prompt_ids": [case.prompts[i // SAMPLES] for i in rows],
            "completion_ids": [case.responses[i] for i in rows],
            "logprobs": [case.rollout_logp[i] for i in rows],
        }
        return found if env_mask is None else found | {"env_mask": [env_mask[i] for i in rows]}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward_of[tuple(ids)] for ids in completion_ids]

    look = Look(step)
    with tempfile.TemporaryDirectory() as folder:
        usual = {
            "algorithm": case.name,
            "loss": dict(case.options),
            "reference_update": case.reference,
            "overlong": False,
            "num_generations": SAMPLES,
            "generation_batch_size": GROUPS * SAMPLES,
            "per_device_train_batch_size": GROUPS * SAMPLES // accumulation,
            "gradient_accumulation_steps": accumulation,
            "num_iterations": 2,  # so that TRL computes the old log-probabilities
            "max_completion_length": LONGEST,
            "temperature": TEMPERATURE,
            "max_steps": step,
            "learning_rate": 0.0,
            "max_grad_norm": 0.0,
        }
        trainer = Moved(
            case.model(case.theta0),
            reward,
            config(folder, **(usual | settings)),
            train_dataset=Dataset.from_dict({"prompt": [texts[i] for i in groups]}),
            processing_class=tiny.tokenizer(),
            callbacks=[look],
            rollout_func=rollout,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.case, look.trainer = case, trainer
        if case.has_reference:
            trainer.reference.copy.load_state_dict(case.theta_ref)
        else:
            assert trainer.reference is None
            assert trainer.ref_model is None
        trainer.train()
    if metrics is not None:
        metrics |= look.metrics
    return float(look.loss), look.gradients


def main(output: str, processes: int) -> None:
    found = {}
    for case, accumulation in IN_TWO:
        size = GROUPS * SAMPLES // (accumulation * processes)
        found[label(case), accumulation] = through_trl(case, accumulation, per_device_train_batch_size=size)
    metrics: dict[str, float] = {}
    through_trl(MEASURED, 4, per_device_train_batch_size=GROUPS * SAMPLES // (4 * processes), metrics=metrics)
    resumed = _resumed(output)
    torch.save({"steps": found, "metrics": metrics, "overlong": overlong(processes), "resumed": resumed}, output)


def overlong(processes: int) -> tuple[float, dict[str, Tensor]]:
    """One group, of which every process has a part; one response is too long."""
    return through_trl(
        Case("dapo"),
        1,
        groups=[0],
        generation_batch_size=SAMPLES,
        per_device_train_batch_size=SAMPLES // processes,
        overlong=True,
        overlong_tokens=1,
    )


def _resumed(folder: str) -> bool:
    """Whether a training that was stopped in the middle of a generation's use ends in the bits of one that was not."""
    from integrations.trl_small import Stop, trainer, weights

    def make(name: str, **more: Any) -> RPGTrainer:
        return trainer(
            f"{os.path.dirname(folder)}/{name}",
            algorithm="rpg-urkl",
            per_device_train_batch_size=4,
            steps_per_generation=2,
            max_steps=4,
            save_strategy="steps",
            save_steps=1,
            more=more,
        )

    whole = make("whole")
    whole.train()
    make("cut", callbacks=[Stop(3)]).train()
    again = make("cut")
    again.train(resume_from_checkpoint=f"{os.path.dirname(folder)}/cut/checkpoint-3")
    theirs = weights(again.model)
    return all(torch.equal(x, theirs[name]) for name, x in weights(whole.model).items())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1] + os.environ["RANK"], int(os.environ["WORLD_SIZE"]))
