"""TRL's GRPOTrainer on the same work, in the fastest of its configurations that this was tried with.

Tried on a CPU: generate() beside continuous batching, micro-batches of different sizes, gradient checkpointing on and
off. What is faster stands below; ``options`` and the work itself override it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from ..models import BUILTIN
from ..rewards.importing import load_function
from ..tasks import load_task
from .step import Took, Work, finish, optimiser_steps, use_threads

MICRO_BATCH = 32  # responses in one pass on a CPU: 16, 32 and 64 take it the same time, 8 more


def arguments(work: Work, folder: str, **options: Any) -> Any:
    """One generation batch of all responses, split into ``minibatches`` optimiser steps, each used once."""
    from trl import GRPOConfig

    cpu = work.device == "cpu"
    micro = math.gcd(work.responses // work.minibatches, MICRO_BATCH) if cpu else work.responses // work.minibatches
    micro = options.pop("micro", work.micro or micro)
    a_step = work.responses // work.minibatches // micro
    return GRPOConfig(
        **{
            "output_dir": folder,
            "max_steps": work.steps * work.minibatches,
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": a_step,
            "steps_per_generation": a_step * work.minibatches,
            "num_iterations": 1,
            "num_generations": work.samples,
            "max_completion_length": work.max_new_tokens,
            "temperature": 1.0,
            "beta": 0.0,  # no reference model
            "learning_rate": work.lr,
            "lr_scheduler_type": "constant",
            "adam_beta2": 0.95,
            "max_grad_norm": 1.0,
            "seed": work.seed,
            "shuffle_dataset": False,
            "use_cpu": cpu,
            "bf16": work.dtype == "bfloat16",
            "gradient_checkpointing": work.checkpointing,
            "disable_dropout": True,
            "dataloader_pin_memory": not cpu,
            "report_to": "none",
            "logging_strategy": "no",
            "save_strategy": "no",
            "disable_tqdm": True,
            **options,
        }
    )


def trl_steps(work: Work, before: Callable[[], None], after: Callable[[Took], None], **options: Any) -> None:
    """GRPOTrainer.train(): ``before`` and ``after`` are called around each batch of rollouts and its training."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import datasets
    import transformers
    import trl

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    use_threads(work)
    task = load_task(work.task, work.seed)
    score = task.reward if work.reward is None else load_function(work.reward)
    folder_of_model = BUILTIN if work.model == "builtin" else work.model
    problems = task.train[: work.prompts * work.steps]
    rows = [{"prompt": problem.prompt, "answer": problem.answer} for problem in problems]
    scores: list[float] = []

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        scores[:] = [float(score(c, a, p)) for p, c, a in zip(prompts, completions, answer, strict=True)]
        return scores

    class Timed(trl.GRPOTrainer):  # type: ignore[misc]
        """Its own methods, with a watch on two of them."""

        seconds: dict[str, float]
        tokens = 0

        @contextmanager
        def watch(self, part: str) -> Iterator[None]:
            begin = perf_counter()
            yield
            finish(work.device)
            self.seconds[part] += perf_counter() - begin

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with self.watch("rollout"):
                found = super()._generate(*args, **kwargs)
            self.tokens = sum(map(len, found[1]))
            return found

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            with self.watch("reward"):
                return super()._calculate_rewards(*args, **kwargs)

    class Turns(transformers.TrainerCallback):  # type: ignore[misc]
        """Waits for its turn before a batch of rollouts, and says what it took after its last optimiser step."""

        begin = 0.0

        def wait(self) -> None:
            before()
            trainer.seconds = {"rollout": 0.0, "reward": 0.0}
            taken.clear()
            finish(work.device)
            self.begin = perf_counter()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % work.minibatches == 0:
                finish(work.device)
                seconds, mean = perf_counter() - self.begin, sum(scores) / len(scores)
                parts = trainer.seconds["rollout"], trainer.seconds["reward"]
                after(Took(seconds, *parts, trainer.tokens, len(scores), len(taken), mean))
                if state.global_step < args.max_steps:
                    self.wait()

    with TemporaryDirectory(prefix="rpg-bench-") as folder, optimiser_steps() as taken:
        trainer = Timed(
            model=transformers.AutoModelForCausalLM.from_pretrained(folder_of_model, dtype=work.dtype),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder_of_model),
            reward_funcs=reward,
            args=arguments(work, folder, **options),
            train_dataset=datasets.Dataset.from_list(rows),
            callbacks=[Turns()],
        )
        trainer.train()
