"""Time until an accuracy on one GPU: `rpg train` beside TRL's GRPOTrainer that generates with vLLM in its process.

    python benchmarks/trl_run.py --model FOLDER --data FOLDER --target 0.38 --minutes 6
    python benchmarks/trl_run.py --model FOLDER --data FOLDER --side trl --json times.json      # one side in a call
    python benchmarks/trl_run.py --model builtin --recipe builtin/dapo --engine transformers --target 0.5 \\
        --steps 4 --every 2 -- --rollout.prompts 4 --eval.problems 32                # on a CPU, in a minute

FOLDER of --model is the model's, that of --data has GSM8K's two files (docs/data.md). Nothing is asked of a hub.

What is the same: the model, the recipe's batch, learning rate and its warm-up, AdamW's constants, minibatches
(optimiser steps on a batch), prompts to the token, temperature, reward functions, no overlong penalty, no KL, bounds
0.8 and 1.28, advantages (R − mean)/std, the token mean. Evaluations are those of `rpg eval` on both sides: the same
problems and random numbers, bfloat16 weights on a GPU, the native engine.

Seconds are those of batches, without evaluations. What comes before the first batch (imports, loading, vLLM's start,
graphs, the first evaluation) is the column "start". The target is reached on the line between two evaluations, as in
what_pays.py; a run ends at its second one at the target or above.

Sides:

    trl        GRPOTrainer, loss dapo. It trains on all groups; those without signal count in the denominator.
    rpg        the recipe as it is: groups without signal are dropped and others sampled in their place
    rpg-fixed  the same without that (--rollout.dynamic false): both sample and train on the same number

What is not the same:

- TRL's weights are float32 and its arithmetic bfloat16 (autocast), as it is by default; rpg has bfloat16 weights beside
  float32 masters. With bfloat16 weights alone (--trl 'model_init_kwargs={"dtype": "bfloat16"}') steps of 3e-6 are
  rounded away.
- TRL scores the responses again before it trains and, by default, leaves out of the loss those whose ρ = old/vLLM
  exceeds 3 (vllm_importance_sampling_mode sequence_mask). rpg recomputes as rollout.old_logp says.
- TRL pads the batch; rpg packs it. TRL's attention is torch's (sdpa). Liger's kernels are left off.
- Each draws its prompts in its own order, and its own responses.
- The padded micro-batch is --micro responses, without gradient checkpointing: try more, if memory allows.

TRL 1.16 takes vLLM 0.22 to 0.31 and warns at others. With FlashInfer not installed, vLLM must not look for it: this
script sets VLLM_USE_FLASHINFER_SAMPLER=0 unless it is set. On a CPU two things of TRL's are replaced, as in
tests/trl_vllm: vLLM does not compile, and weights go through vLLM's own reload.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from what_pays import QUIET, reached, read, scores

BEGIN = time.perf_counter()
SIDES = ("trl", "rpg", "rpg-fixed")
MOST = 20_000  # prompts, of a task without end
# as `rpg`, also where packages of its extra are not installed that no run here needs (tensorboard, datasets)
RPG = "from rpg import cli; cli.more_than_core = lambda: None; raise SystemExit(cli.main())"
Row = dict[str, Any]


def flags_of(args: argparse.Namespace) -> list[str]:
    """The settings that both sides have."""
    here = ["--model", args.model, "--minutes", str(args.minutes), "--eval.every", str(args.every)]
    here += ["--rollout.overlong", "false"]
    return [*here, *(["--steps", str(args.steps)] if args.steps else []), *args.options]


def is_there(found: list[tuple[int, float, int, float]], target: float) -> bool:
    """An evaluation is noisy: a run ends at its second one at the target or above."""
    return sum(score >= target for *_, score in found) >= 2


def finished(args: argparse.Namespace, side: str, found: Row) -> Row:
    """One line of the result: medians over the batches after the first."""
    batches = found.pop("batches")
    parts = {name: statistics.median(row[name] for row in batches[1:] or batches) for name in batches[0]}
    same = {"side": side, "engine": args.engine if side == "trl" else "native", "seed": args.seed}
    return {**same, "target": args.target, **found, "first": batches[0]["batch"], "seconds": parts}


# ---- rpg -------------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, options: list[str]) -> tuple[list[Row], float]:
    """The rows of metrics.jsonl of a run that ends at the target; and the seconds until its first evaluation."""
    begin, first = time.perf_counter(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        run = ["train", "--output", f"{folder}/run", "--seed", str(args.seed), *QUIET, *options]
        path, said = Path(folder) / "run" / "metrics.jsonl", Path(folder) / "said"
        with said.open("w") as errors:
            process = subprocess.Popen([sys.executable, "-c", RPG, *run], stdout=errors, stderr=errors)
            while process.poll() is None:
                time.sleep(0.5)
                rows = read(path)
                first = first or (time.perf_counter() - begin if rows else 0.0)
                if is_there(scores(rows), args.target):
                    process.terminate()  # it ends after its step
                    process.wait()
                    break
        rows = read(path)
        if process.returncode not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
            raise SystemExit(said.read_text())
    return rows, first


def run_rpg(args: argparse.Namespace, side: str) -> Row:
    options = ["--config", args.recipe, *flags_of(args)]
    options += ["--rollout.dynamic", "false"] if side == "rpg-fixed" else []
    rows, start = train(args, options)
    batches = [
        {
            "batch": row["time/step"] - row.get("time/eval", 0.0),
            "generate": row["time/rollout"],
            "reward": row["time/reward"],
            "train": row["time/train"],
        }
        for row in rows
        if "time/train" in row
    ]
    memory = max((row.get("memory/gpu_peak_gb", 0.0) for row in rows), default=0.0)
    return finished(args, side, {"scores": scores(rows), "start": start, "memory_gb": memory, "batches": batches})


# ---- TRL -------------------------------------------------------------------------------------------------------------


class Judge:
    """Evaluations and rewards as `rpg train` has them, of another trainer's model: its weights are copied into one of
    the evaluation's dtype."""

    def __init__(self, config: Any):
        from rpg.models.policy import Policy
        from rpg.training.evaluate import evaluate
        from rpg.training.oom_retry import pick_layout
        from rpg.training.samples.collect import Sampler
        from rpg.training.setup import check_fit, held_out, make_engine, make_scorer, pick_device, pick_dtype, task_of

        device = pick_device(config.device)
        self.config, self.task = config, task_of(config)
        self.policy = Policy.load(config.model, device=device, dtype=pick_dtype(config.dtype, device))
        self.engine = make_engine(self.policy, config, pick_layout(self.policy, config, held=False, trained=False))
        self.problems = held_out(self.task, config)
        self.engine.expect(max(check_fit(self.policy, some, config) for some in self.problems.values()))
        self.sampler = Sampler(self.policy, self.engine, make_scorer(config, self.task), config)
        self.evaluate = functools.partial(evaluate, self.sampler, self.problems, 0)

    def prompts(self) -> list[dict[str, Any]]:
        """Texts that TRL's tokenizer makes the same tokens of, and each problem's number."""
        from rpg.training.samples.collect import PromptTooLong, encode_prompt

        rows, tokenizer = [], self.policy.tokenizer
        for i in range(min(len(self.task.train), MOST)):
            with contextlib.suppress(PromptTooLong):
                ids = encode_prompt(self.policy, self.task.train[i], self.config)
                text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                rows.append({"prompt": text, "number": i, "ids": ids})
        again = tokenizer(text=[row["prompt"] for row in rows])["input_ids"]
        same = [row for row, ids in zip(rows, again, strict=True) if row.pop("ids") == ids]
        if len(same) < len(rows):
            print(f"{len(rows) - len(same)} prompts left out: TRL would read other tokens", file=sys.stderr)
        return same

    def reward(self, completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        from rpg.rollout import Rollout

        rollouts = [Rollout(list(ids), [0.0] * len(ids), finished=True) for ids in completion_ids]
        responses, _ = self.sampler.score([self.task.train[i] for i in number], rollouts)
        return [response.score for response in responses]

    def __call__(self, model: Any) -> float:
        import torch

        begun = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            for name, p in model.named_parameters():
                begun.pop(name).copy_(p)
        if begun:
            raise SystemExit(f"the trainer's model has no {next(iter(begun))}")
        self.engine.sync()
        found = self.evaluate()
        self.engine.release()
        return statistics.mean(each.mean.mean for each in found)


def now() -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def trainer_class() -> Any:
    import torch
    from trl import GRPOTrainer

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """Seconds of generation, with the weights' way to vLLM, and of rewards; and rpg's warm-up, whose first step
        has a rate above 0."""

        spent = {"generate": 0.0, "reward": 0.0}  # noqa: RUF012

        @contextlib.contextmanager
        def timed(self, name: str) -> Iterator[None]:
            begin = now()
            yield
            self.spent[name] += now() - begin

        def _generate(self, *given: Any) -> Any:
            with self.timed("generate"):
                return super()._generate(*given)

        def _calculate_rewards(self, *given: Any) -> Any:
            with self.timed("reward"):
                return super()._calculate_rewards(*given)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            rate, warmup = torch.optim.lr_scheduler.LambdaLR, max(1, int(self.args.warmup_steps))
            self.lr_scheduler = rate(optimizer or self.optimizer, lambda k: min(1.0, (k + 1) / warmup))
            return self.lr_scheduler

    return Timed


def watch_class() -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Counts the seconds and tokens of each batch, evaluates, and ends the run."""

        def __init__(self, args: argparse.Namespace, judge: Judge, minibatches: int):
            self.args, self.judge, self.minibatches = args, judge, minibatches
            self.seconds, self.tokens, self.start = 0.0, 0, 0.0
            self.scores: list[tuple[int, float, int, float]] = []
            self.batches: list[dict[str, float]] = []
            self.apart: dict[str, float] = {}  # vLLM's log-probabilities and the trainer's, in the last batch

        def reward(self, completion_ids: list[list[int]], **given: Any) -> list[float]:
            self.tokens += sum(map(len, completion_ids))
            return self.judge.reward(completion_ids, **given)

        def look(self, step: int, model: Any) -> None:
            self.scores.append((step, self.seconds, self.tokens, self.judge(model)))
            print(f"step {step}  {self.seconds:.1f} s  {self.scores[-1][3]:.1%}", file=sys.stderr, flush=True)
            self.since = now()

        def warm(self) -> None:
            """vLLM's first responses, as an evaluation is the native engine's first."""
            if self.trainer.use_vllm:
                texts = self.trainer.train_dataset[: self.judge.config.rollout.prompts]["prompt"]
                ids = self.judge.policy.tokenizer(text=texts)["input_ids"]
                self.trainer.vllm_generation.generate(ids, None, 1)

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.warm()
            self.look(0, given["model"])
            self.start = time.perf_counter() - BEGIN

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step % self.minibatches:
                return
            step, spent = state.global_step // self.minibatches, self.trainer.spent
            begin, self.since = self.since, now()
            batch = self.since - begin
            self.seconds += batch
            self.batches.append({"batch": batch, **spent, "train": batch - sum(spent.values())})
            noted = self.trainer._metrics["train"]  # cleared where it is logged, which is off
            self.apart = {name: values[-1] for name, values in noted.items() if name.startswith("sampling/") and values}
            spent.update(dict.fromkeys(spent, 0.0))
            over = step == self.args.steps or self.seconds >= 60 * self.args.minutes
            if over or step % self.args.every == 0:
                self.look(step, given["model"])
            if over or is_there(self.scores, self.args.target):
                control.should_training_stop = True

    return Watch


def run_trl(args: argparse.Namespace) -> Row:
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig

    from rpg.api import configure
    from rpg.models.policy import Policy
    from rpg.run.auto import settled

    named = args.options
    flags = dict(zip((name.removeprefix("--") for name in named[::2]), named[1::2], strict=True))
    config = configure(args.recipe, flags=flags, settings={"model": args.model, "seed": args.seed})
    config = settled(config)
    rollout, optim, on_gpu = config.rollout, config.optim, torch.cuda.is_available()
    judge = Judge(config)
    each = rollout.prompts * rollout.samples // optim.minibatches
    micro = min(args.micro, each)
    if each % micro or rollout.prompts * rollout.samples % optim.minibatches:
        raise SystemExit(f"--micro must divide the {each} responses of an optimiser step")
    settings: dict[str, Any] = {
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "scale_rewards": "group",
        "num_generations": rollout.samples,
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": each // micro,
        "steps_per_generation": rollout.prompts * rollout.samples // micro,
        "learning_rate": float(optim.lr),
        "warmup_steps": optim.warmup,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.max_grad_norm,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": False,
        "max_steps": optim.minibatches * (args.steps or 100_000),
        "seed": args.seed,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if args.engine == "vllm":
        length = rollout.max_prompt_tokens + rollout.max_new_tokens
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": length}
        if not on_gpu:
            vllm_on_a_cpu()
    for pair in args.trl:
        name, _, value = pair.partition("=")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    if Path(args.model).is_dir():
        model: Any = args.model  # TRL loads it itself, in float32
    else:
        model = Policy.load(config.model).model
    watch = watch_class()(args, judge, optim.minibatches)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class()(
            model,
            watch.reward,
            GRPOConfig(folder, **settings),
            train_dataset=Dataset.from_list(judge.prompts()),
            processing_class=judge.policy.tokenizer,
            callbacks=[watch],
        )
        watch.trainer = trainer
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    found = {"scores": watch.scores, "start": watch.start, "memory_gb": memory, "batches": watch.batches}
    return finished(args, "trl", found | {"apart": watch.apart})


def vllm_on_a_cpu() -> None:
    """See tests/trl_vllm: vLLM without its compilation, and weights by its own reload."""
    import torch
    from trl.generation import vllm_generation

    from rpg.rollout.vllm import _load

    def sync_weights(self: Any) -> None:
        with torch.no_grad():
            self.llm.collective_rpc(_load, args=(self._iter_named_params(),))
        self.llm.reset_prefix_cache()

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, enforce_eager=True, dtype="float32")
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


# ---- both ------------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> None:
    """Of the results, one line each: what it took to the target; a batch's seconds, medians without the first."""
    names = [
        "target",
        "seconds",
        "batches",
        "tokens",
        "best",
        "batch",
        "sampling",
        "rewards",
        "training",
        "first",
        "start",
    ]
    print(f"| side | {' | '.join(names)} |")
    print("|---|" + "---:|" * len(names))
    for row in rows:
        there, seconds = reached(row, row["target"]), row["seconds"]
        to = f"{there[1]:.0f} | {there[0]:.0f} | {there[2]:,.0f}" if there else "not reached | | "
        parts = " | ".join(f"{seconds[name]:.2f}" for name in ("batch", "generate", "reward", "train"))
        side = f"trl, {row['engine']}" if row["side"] == "trl" else row["side"]
        best = max(score for *_, score in row["scores"])
        rest = f"{best:.1%} | {parts} | {row['first']:.1f} | {row['start']:.0f}"
        print(f"| {side} | {row['target']:.1%} | {to} | {rest} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", help="folder of the task's files (RPG_DATA)")
    parser.add_argument("--recipe", default="gsm8k/qwen2.5-coder-0.5b/dapo")
    parser.add_argument("--target", type=float, default=0.38)
    parser.add_argument("--minutes", type=float, default=6.0, help="of batches, for each side")
    parser.add_argument("--steps", type=int, default=0, help="batches at most; 0: as the minutes have it")
    parser.add_argument("--every", type=int, default=20, help="batches between evaluations")
    parser.add_argument("--side", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm", help="TRL's")
    parser.add_argument("--micro", type=int, default=32, help="TRL: responses in one forward and backward pass")
    parser.add_argument("--trl", nargs="*", default=[], metavar="NAME=VALUE", help="any setting of GRPOConfig")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="results are added to it, and the table has all of them")
    parser.add_argument("options", nargs="*", help="after --: settings of rpg train, for both sides")
    args = parser.parse_args()
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for name, value in (offline | ({"RPG_DATA": args.data} if args.data else {})).items():
        os.environ.setdefault(name, value)
    if len(args.side) > 1:  # each in a process of its own: the GPU is free before the next
        with tempfile.TemporaryDirectory() as folder:
            args.json = args.json or Path(folder) / "times.json"
            given = without_side(sys.argv[1:])
            for side in args.side:
                command = [sys.executable, __file__, "--side", side, "--json", str(args.json), *given]
                if code := subprocess.run(command, stdout=sys.stderr).returncode:
                    print(f"{side} ended with {code}", file=sys.stderr, flush=True)
            if args.json.exists():
                table(json.loads(args.json.read_text()))
        return
    row = run_trl(args) if args.side == ["trl"] else run_rpg(args, args.side[0])
    print(json.dumps(row), flush=True)
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    rows.append(row)
    if args.json:
        args.json.write_text(json.dumps(rows))
    table(rows)


def without_side(given: list[str]) -> list[str]:
    """The arguments without --side and what follows it."""
    kept, skipping = [], False
    for word in given:
        skipping = word == "--side" or (skipping and word in SIDES)
        if not skipping:
            kept.append(word)
    return kept


if __name__ == "__main__":
    main()
