"""What both sides do, what is said of each step, and rpg's own side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal

import torch

from ..run.config import CheckpointConfig, Config, EvalConfig, LogConfig, OptimConfig, RolloutConfig, TaskConfig

WARMUP = 1  # steps of each side that do not count


@dataclass(frozen=True)
class Work:
    """One step: prompts × samples responses, scored, and trained on in ``minibatches`` optimiser steps."""

    prompts: int = RolloutConfig.prompts
    samples: int = RolloutConfig.samples
    max_new_tokens: int = RolloutConfig.max_new_tokens
    minibatches: int = OptimConfig.minibatches
    repeats: int = 10
    threads: int = 1
    device: str = "cpu"
    seed: int = 0
    lr: float = 1e-9  # the policy stays where it is, and with it the lengths of responses
    model: str = "builtin"  # or a folder
    dtype: Literal["float32", "bfloat16"] = "float32"
    task: str = "arithmetic"  # or a .jsonl file
    reward: str | None = None  # None: the task's own
    max_prompt_tokens: int = RolloutConfig.max_prompt_tokens
    slots: int | None = None
    micro: int | None = None  # responses in one pass of TRL; None: the fastest on a CPU
    checkpointing: bool = False  # TRL's activations computed anew in the backward pass
    limit: float | None = None  # seconds that a side may take for a step

    @property
    def responses(self) -> int:
        return self.prompts * self.samples

    @property
    def steps(self) -> int:
        return WARMUP + self.repeats


@dataclass(frozen=True)
class Took:
    """One step of one side. Seconds of the parts add up to the whole."""

    seconds: float
    rollout: float
    reward: float
    tokens: int  # sampled
    responses: int
    optimiser_steps: int
    score: float  # mean reward

    @property
    def train(self) -> float:
        return self.seconds - self.rollout - self.reward

    @property
    def length(self) -> float:
        return self.tokens / self.responses


def use_threads(work: Work) -> None:
    torch.set_num_threads(work.threads)


@contextmanager
def optimiser_steps() -> Iterator[list[object]]:
    """Every step that any torch optimiser takes within, counted from outside both libraries."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    taken: list[object] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: taken.append(None))
    try:
        yield taken
    finally:
        handle.remove()


def peak_memory_gb(device: str) -> float:
    """Of this process: on a GPU what torch allocated there, else resident memory."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**30
    from ..training.summary import peak_memory_gb as on_the_host

    return on_the_host()


def finish(device: str) -> None:
    """What a GPU was asked to do is part of the step."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


# ---- rpg -------------------------------------------------------------------------------------------------------------


def settings(work: Work, folder: Path) -> Config:
    """``rpg train`` as it comes, but for the sizes and for what would make steps differ from each other."""
    return Config(
        steps=2**31,  # no step is the last, which would be evaluated and saved
        seed=work.seed,
        device=work.device,
        model=work.model,
        dtype=work.dtype,
        output=str(folder),
        task=TaskConfig(name=work.task, reward=work.reward),
        rollout=RolloutConfig(
            prompts=work.prompts,
            samples=work.samples,
            max_new_tokens=work.max_new_tokens,
            max_prompt_tokens=work.max_prompt_tokens,
            slots=work.slots,
            dynamic=False,
            overlong=False,
        ),
        optim=OptimConfig(lr=work.lr, warmup=0, schedule="constant", minibatches=work.minibatches),
        eval=EvalConfig(every=0, problems=1),
        checkpoint=CheckpointConfig(every=0),
        log=LogConfig(tensorboard=False, report=False, view="none"),
    )


def rpg_steps(work: Work) -> Iterator[Took]:
    """``Trainer.step`` of ``rpg train``, its metrics and samples written to files as ever."""
    from ..run.logs import RunLogs
    from ..run.settings import flat
    from ..run.view import View
    from ..training.loop import Trainer

    class Kept(View):
        row: dict[str, Any]

        def step(self, row: Any) -> None:
            self.row = row

    use_threads(work)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rpg-bench-")))
        config, view = settings(work, folder), Kept()
        trainer = stack.enter_context(Trainer(config, folder, view))
        logs = stack.enter_context(RunLogs(folder, config.log, "bench", flat(config)))
        taken = stack.enter_context(optimiser_steps())
        for step in range(1, work.steps + 1):
            taken.clear()
            finish(work.device)
            begin = perf_counter()
            trainer.step(step, logs)
            finish(work.device)
            seconds = perf_counter() - begin
            row = view.row
            yield Took(
                seconds,
                row["time/rollout"],
                row["time/reward"],
                int(row["tokens"]),
                work.responses,
                len(taken),
                row["reward/mean"],
            )
