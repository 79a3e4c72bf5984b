"""The whole RL step of rpg and of TRL's GRPOTrainer on the same work, in two processes that take turns."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal

import torch

from ..run.auto import TOY_LENGTH
from ..run.config import CheckpointConfig, Config, EvalConfig, LogConfig, OptimConfig, RolloutConfig, TaskConfig
from ..run.folder import RunFolder
from .timing import SideFailed, Watch, finish, peak_gib, process

WARMUP = 1  # steps of each side that do not count
MICRO_BATCH = 32  # responses in one pass of TRL on a CPU: 16, 32 and 64 take it the same time, 8 more


@dataclass(frozen=True)
class StepWork:
    """One step: prompts × samples responses, scored, and trained on in ``minibatches`` optimiser steps."""

    prompts: int = RolloutConfig.prompts
    samples: int = RolloutConfig.samples
    max_new_tokens: int = TOY_LENGTH
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
    checkpointing: bool = False  # TRL's activations computed again in the backward pass
    limit: float | None = None  # seconds that a side may take for a step

    @property
    def responses(self) -> int:
        return self.prompts * self.samples

    @property
    def steps(self) -> int:
        return WARMUP + self.repeats


@dataclass(frozen=True)
class StepTimes:
    """One step of one side. The seconds of rollout, reward and training add up to the whole."""

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


Before = Callable[[], Any]  # called ahead of each step of a side
After = Callable[[StepTimes], None]


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


# ---- rpg -------------------------------------------------------------------------------------------------------------


def rpg_config(work: StepWork, folder: Path) -> Config:
    """``rpg train`` as it comes, but for the sizes and for what would make steps differ from each other."""
    return Config(
        steps=10**9,  # no step is the last, which would be evaluated and saved
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


def rpg_steps(work: StepWork, before: Before, after: After) -> None:
    """``Trainer.step`` of ``rpg train``, its metrics and samples written to files as ever."""
    from ..run.logs import RunLogs
    from ..run.settings import flat
    from ..run.view import View
    from ..training.loop import Trainer

    class LastRow(View):
        row: dict[str, Any]

        def step(self, row: Any) -> None:
            self.row = row

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="rpg-bench-")))
        config, view = rpg_config(work, folder), LastRow()
        trainer = stack.enter_context(Trainer(config, RunFolder(folder), view))
        logs = stack.enter_context(RunLogs(folder, config.log, "bench", flat(config)))
        taken = stack.enter_context(optimiser_steps())
        for step in range(1, work.steps + 1):
            before()
            taken.clear()
            finish(work.device)
            begin = perf_counter()
            trainer.step(step, logs)
            finish(work.device)
            seconds, row = perf_counter() - begin, view.row
            times, tokens = (row["time/rollout"], row["time/reward"]), int(row["tokens"])
            after(StepTimes(seconds, *times, tokens, work.responses, len(taken), row["reward/mean"]))


# ---- TRL -------------------------------------------------------------------------------------------------------------


def trl_config(work: StepWork, folder: str) -> Any:
    """One generation batch of all responses, split into ``minibatches`` optimiser steps, each used once.

    Tried on a CPU: generate() beside continuous batching, micro-batches of different sizes, gradient checkpointing on
    and off. What is fastest stands here; the work itself overrides it.
    """
    from trl import GRPOConfig

    cpu, a_minibatch = work.device == "cpu", work.responses // work.minibatches
    micro = work.micro or (math.gcd(a_minibatch, MICRO_BATCH) if cpu else a_minibatch)
    return GRPOConfig(
        output_dir=folder,
        max_steps=work.steps * work.minibatches,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=a_minibatch // micro,
        steps_per_generation=a_minibatch // micro * work.minibatches,
        num_iterations=1,
        num_generations=work.samples,
        max_completion_length=work.max_new_tokens,
        temperature=1.0,
        beta=0.0,  # no reference model
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        seed=work.seed,
        shuffle_dataset=False,
        use_cpu=cpu,
        bf16=work.dtype == "bfloat16",
        gradient_checkpointing=work.checkpointing,
        disable_dropout=True,
        dataloader_pin_memory=not cpu,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )


def trl_steps(work: StepWork, before: Before, after: After) -> None:
    """GRPOTrainer.train(), a step being a batch of rollouts and the training on it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import datasets
    import transformers
    import trl

    from ..models import BUILTIN
    from ..rewards.importing import load_function
    from ..tasks import load_task

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    task = load_task(work.task, work.seed)
    score = task.reward if work.reward is None else load_function(work.reward)
    model_folder = BUILTIN if work.model == "builtin" else work.model
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
                generated = super()._generate(*args, **kwargs)
            self.tokens = sum(map(len, generated[1]))
            return generated

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
                times = trainer.seconds["rollout"], trainer.seconds["reward"]
                after(StepTimes(seconds, *times, trainer.tokens, len(scores), len(taken), mean))
                if state.global_step < args.max_steps:
                    self.wait()

    with TemporaryDirectory(prefix="rpg-bench-") as folder, optimiser_steps() as taken:
        trainer = Timed(
            model=transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=work.dtype),
            processing_class=transformers.AutoTokenizer.from_pretrained(model_folder),
            reward_funcs=reward,
            args=trl_config(work, folder),
            train_dataset=datasets.Dataset.from_list(rows),
            callbacks=[Turns()],
        )
        trainer.train()


# ---- in turns --------------------------------------------------------------------------------------------------------

SIDES: dict[str, Callable[[StepWork, Before, After], None]] = {"rpg": rpg_steps, "trl": trl_steps}


@dataclass
class SideResult:
    """The steps of a side that count, and the memory its process had at most."""

    steps: list[StepTimes] = field(default_factory=list)
    peak_memory_gb: float = 0.0


def _take_steps(pipe: Connection, side: str, work: StepWork) -> None:
    """In a side's process: a step whenever it is told to, then what it took."""
    torch.set_num_threads(work.threads)
    pipe.send(None)  # started
    try:
        SIDES[side](work, pipe.recv, lambda times: pipe.send((times, peak_gib(work.device))))
    except ValueError as error:  # what was asked for is impossible
        raise SideFailed(" ".join(str(error).split())) from error


def compare(work: StepWork, sides: tuple[str, ...], watch: Watch = lambda text: None) -> dict[str, SideResult]:
    """Each side's steps, in turns, so that the machine's noise meets both; who goes first alternates too."""
    results = {side: SideResult() for side in sides}
    with ExitStack() as stack:
        started = {side: stack.enter_context(process(_take_steps, side, work, limit=work.limit)) for side in sides}
        for _, receive in started.values():
            receive()
        for number in range(work.steps):
            for side in sides if number % 2 else sides[::-1]:
                watch(f"step {number + 1}/{work.steps}: {side}")
                pipe, receive = started[side]
                pipe.send(None)
                try:
                    times, results[side].peak_memory_gb = receive()
                except SideFailed as error:
                    raise SideFailed(f"{side}: {error}") from error
                if number >= WARMUP:
                    results[side].steps.append(times)
    return results
