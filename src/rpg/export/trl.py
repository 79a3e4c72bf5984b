"""A recipe as a script for TRL: the same problems and rewards, every setting in an RPGConfig, an RPGTrainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..loss.methods import Method
from ..run.config import Config
from ..secrets import without_secrets
from ..training.samples.collect import signal_of
from ..training.setup import method_of
from . import recipe
from .start import Launch, fresh

VLLM = {  # options of vLLM that TRL passes on
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "max_model_len": "vllm_max_model_length",
}
HALF = "torch.cuda.is_available() and torch.cuda.is_bf16_supported()"


class Code(str):
    """Text of the script that is no string in it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def command(launch: Launch) -> str:
    """What starts the script."""
    if launch.processes == 1:
        return "python"
    nodes = f" --num_machines {launch.nodes} --machine_rank $RANK --main_process_ip $HOST" if launch.nodes > 1 else ""
    return f"accelerate launch --num_processes {launch.processes}{nodes}"


def fields(config: Config, launch: Launch | None = None) -> dict[str, Any]:
    """Arguments of RPGConfig; what TRL cannot express is a ValueError that names it."""
    launch = Launch(fresh(config)) if launch is None else launch
    _refuse(config, method_of(config), launch)
    return {
        **_algorithm(config, method_of(config)),
        **_batches(config, launch),
        **_rollout(config, launch),
        **_optim(config),
        **_around(config),
    }


def _refuse(config: Config, method: Method, launch: Launch) -> None:
    """What would change the result; the trainer itself refuses what an algorithm needs besides."""
    rollout, start, anchor = config.rollout, launch.start, method.anchor
    vllm = sorted(set(rollout.vllm) - set(VLLM))
    greedy = "its baseline is the reward of a greedy response to each prompt, which TRL does not sample"
    by_step = "TRL's moves at every optimiser step, of which a batch has several; give --reference.update every"
    reasons = {
        "rollout.old_logp=engine": rollout.old_logp == "engine" and "TRL recomputes them, or not at all on-policy",
        f"rollout.vllm.{(vllm or [''])[0]}": rollout.engine == "vllm" and vllm and "leave it out",
        f"algorithm={method.name}": method.only_here or (method.needs_greedy and greedy),
        "peft.base_bits": config.peft.base_bits is not None and "it would round the base in its own way: leave it out",
        "peft.options.lora_dropout": config.peft.options.get("lora_dropout") and "it must be 0, as for rpg train",
        f"reference.update={anchor}": anchor == "ema" and recipe.steps_a_batch(config) > 1 and by_step,
    }
    recipe.refuse(config, "TRL", reasons)
    if anchor == "frozen" and start.adapter and start.step:
        raise ValueError("reference.update=frozen: TRL would take the checkpoint's adapter for the reference")
    recipe.check_reference(start, config, anchor, "TRL")


def _algorithm(config: Config, method: Method) -> dict[str, Any]:
    rollout, reference = config.rollout, config.reference
    return {
        "algorithm": config.algorithm,
        "loss": recipe.loss_options(config, method),
        "reference_update": reference.update,
        "reference_every": reference.every,
        "reference_count": reference.count,
        "reference_kl": reference.kl,
        "reference_smoothing": reference.smoothing,
        "reference_decay": reference.decay,
        "dynamic": rollout.dynamic,
        **({"dynamic_by": "correct", "reward_weights": [1.0, 0.0]} if tells_correct(config, method) else {}),
        "overlong": rollout.overlong,
        "overlong_tokens": rollout.overlong_tokens,
    }


def tells_correct(config: Config, method: Method) -> bool:
    """Whether the script has a second reward function, of no weight: which responses are correct."""
    return method.dynamic and signal_of(config) == "correct"


def _batches(config: Config, launch: Launch) -> dict[str, Any]:
    rollout, optim = config.rollout, config.optim
    total = rollout.prompts * rollout.samples
    share, rest = divmod(total, optim.minibatches * launch.processes)
    if rest:
        raise ValueError(
            f"rollout.prompts × samples = {total} responses do not divide among optim.minibatches="
            f"{optim.minibatches} × {launch.processes} processes: give other --gpus, --nodes or --optim.minibatches"
        )
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    most = max(1, (optim.micro_tokens or recipe.GPU_TOKENS) // longest)
    size = max(n for n in range(1, share + 1) if share % n == 0 and n <= most)
    return {
        "num_generations": rollout.samples,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": share // size,
        "steps_per_generation": optim.minibatches * (share // size),
        "num_iterations": optim.epochs,
        "max_steps": launch.start.steps_left(config) * recipe.steps_a_batch(config),
    }


def _rollout(config: Config, launch: Launch) -> dict[str, Any]:
    rollout = config.rollout
    each = recipe.tensor_parallel(config) if rollout.engine == "vllm" else 1
    if launch.processes % each:
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size={each} does not divide {launch.processes} processes: give other --gpus"
        )
    out: dict[str, Any] = {
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p or None,
        "chat_template_kwargs": dict(config.task.chat_options),
        "shuffle_dataset": Code("not IN_ORDER"),
        "use_vllm": rollout.engine == "vllm",
    }
    if rollout.engine == "vllm":
        out |= {VLLM[name]: value for name, value in rollout.vllm.items()}
    return out


def _optim(config: Config) -> dict[str, Any]:
    optim = config.optim
    half = {"auto": Code(HALF), "bfloat16": True, "float32": False}[config.dtype]
    return {
        "learning_rate": optim.lr,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": 1e-8,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.max_grad_norm,
        "gradient_checkpointing": Code("torch.cuda.is_available()") if optim.recompute is None else optim.recompute,
        "bf16": half,
        "model_init_kwargs": {**without_secrets(config.model_options), "dtype": "float32"},
        "use_cpu": Code("not torch.cuda.is_available()") if config.device == "auto" else config.device == "cpu",
        "seed": config.seed,
    }


def _around(config: Config) -> dict[str, Any]:
    keep, each = config.checkpoint, recipe.steps_a_batch(config)
    loggers, project, name = recipe.trackers(config)
    out: dict[str, Any] = {
        "output_dir": Code("str(HERE / 'checkpoints')"),
        "save_strategy": "steps" if keep.every and keep.keep else "no",
        "save_steps": (keep.every or 1) * each,
        "save_total_limit": keep.keep or None,
        "report_to": loggers,
        "project": project,
        "run_name": name,
        "logging_steps": each,
    }
    if not evaluated(config):
        return out
    return out | {
        "eval_strategy": "steps" if config.eval.every else "no",
        "eval_steps": (config.eval.every or 1) * each,
        "eval_on_start": True,
        "num_generations_eval": config.eval.k,
        "per_device_eval_batch_size": config.eval.k,
    }


def evaluated(config: Config) -> bool:
    """TRL evaluates with the sampling of training alone; rpg train does without top_k and min_p."""
    same = (config.eval.temperature, config.eval.top_p) == (config.rollout.temperature, config.rollout.top_p)
    return same and config.rollout.top_k == 0 and config.rollout.min_p == 0


def left_out(config: Config, launch: Launch) -> Iterator[str]:
    """What is not carried over, or is another thing in TRL, though the run is the same without it."""
    rollout, optim, keep = config.rollout, config.optim, config.checkpoint
    if launch.start.step:
        yield "the optimiser's moments: AdamW starts afresh from the checkpoint's weights"
    if config.minutes is not None:
        yield f"minutes={config.minutes:g}: the run ends after its steps"
    if config.tokens is not None:
        yield f"tokens={config.tokens:,}: the run ends after its steps"
    if method_of(config).dynamic:
        names = f"rollout.oversample={rollout.oversample:g}, rollout.max_rounds={rollout.max_rounds}"
        yield f"{names}: groups without signal are dropped, but no others are sampled in their place"
    if method_of(config).min_signal:
        yield f"rollout.min_signal={method_of(config).min_signal:g}: TRL samples no more where few groups have signal"
    yield "the order of the problems of a file: TRL shuffles them itself, by the same seed but otherwise"
    yield "minibatches: of the same size, but TRL does not keep the responses to a prompt together"
    if rollout.engine == "native":
        yield "rollout.engine=native, rollout.slots: model.generate; --rollout.engine vllm is faster"
    elif method_of(config).loss.mismatch is None:
        yield "loss.mismatch: exact, as RPGTrainer has it with vLLM where the recipe names no rule"
    if rollout.cache_dtype != "auto" or optim.offload:
        yield "rollout.cache_dtype, optim.offload: they are of rpg's own engine"
    if config.stale or rollout.choose != "passes":
        yield "rollout.ahead, rollout.choose, offpolicy: they are of rpg's own loop; TRL samples, then trains on that"
    if optim.weight_decay:
        yield f"optim.weight_decay={optim.weight_decay:g}: TRL's is on embeddings too"
    if not evaluated(config):
        how = f"eval.temperature={config.eval.temperature:g}, eval.top_p={config.eval.top_p:g}"
        if config.rollout.top_k:
            how += f" and no top_k (rollout.top_k={config.rollout.top_k})"
        if config.rollout.min_p:
            how += f" and no min_p (rollout.min_p={config.rollout.min_p:g})"
        yield f"{how}: TRL evaluates as it samples; use rpg eval on the checkpoints"
    else:
        yield "evaluation: TRL reports the mean reward; rpg eval on the checkpoints gives mean@k and pass@k"
    yield f"optim.max_bad_steps={optim.max_bad_steps}, log.view, log.report, log.samples={config.log.samples}"
    if config.log.record is not None:
        yield f"log.record={config.log.record}: RPGConfig has record=FILE and record_step"
    if keep.best and keep.keep:
        yield "checkpoint.best: TRL keeps the newest"


# ---- the script ------------------------------------------------------------------------------------------------------

SCRIPT = '''\
"""{title}

{command} train.py

Written by rpg export trl.{began} Not carried over:
{left_out}
"""

from pathlib import Path

import torch
from datasets import Dataset
{peft_import}from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer

from rpg.export.data import messages, uses_chat
from rpg.integrations.trl import RPGConfig, RPGTrainer
{rpg_import}from rpg.run.config import Config
from rpg.run.settings import build
from rpg.tasks import ENDLESS, load_task
from rpg.training.optim import learning_rate
from rpg.training.setup import held_out, make_scorer

HERE = Path(__file__).parent
RECIPE = build(Config, file=HERE / "recipe.yaml")
MODEL = {model}
STEPS_BEFORE, STEPS_A_BATCH = {before}, {each}  # steps of rpg train that are done; optimiser steps on one batch
ASKED = RECIPE.task
TASK = load_task(ASKED.name, RECIPE.seed, ASKED.test, ASKED.prompt_key, ASKED.answer_key)
IN_ORDER = len(TASK.train) >= ENDLESS  # problems without end come as the task makes them, the next ones first
TRAIN = TASK.train[{problem} : {problem} + {count}] if IN_ORDER else TASK.train
SETS = {{"train": TRAIN, **{{f"test/{{name}}": problems for name, problems in held_out(TASK, RECIPE).items()}}}}


def rows(name, tokenizer):
    """The prompts as rpg train puts them; a row names its problem, whose answer may be more than a text."""
    chat, table = uses_chat(tokenizer, RECIPE), []
    for i, problem in enumerate(SETS[name]):
        prompt = messages(problem, RECIPE)
        if chat:
            options = RECIPE.task.chat_options
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **options)
        else:
            prompt = prompt[-1]["content"]
            ids = tokenizer(prompt)["input_ids"]
        if len(ids) <= RECIPE.rollout.max_prompt_tokens:
            table.append({{"prompt": prompt, "set": name, "problem": i}})
    return Dataset.from_list(table)


def rewards(scorer):
    """rpg's scorer as {what} of TRL."""
{last}
    def reward(completions, problem, **columns):
        problems = [SETS[name][i] for name, i in zip(columns["set"], problem, strict=True)]
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        {scores} = scorer.score([(t, p.answer, p.prompt) for t, p in zip(texts, problems, strict=True)])
        return {scores}.values
{correct}
    return {functions}


class Trainer(RPGTrainer):
    """With the learning rate of rpg train, which the settings below have the peak of."""

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.lr_scheduler is None:
            done, total = STEPS_BEFORE * STEPS_A_BATCH, RECIPE.steps * STEPS_A_BATCH
            self.lr_scheduler = LambdaLR(
                self.optimizer if optimizer is None else optimizer,
                lambda step: learning_rate(RECIPE.optim, done + step, total) / RECIPE.optim.lr,
            )
        return self.lr_scheduler


def settings():
    return RPGConfig(
{fields}
    )


def main():
    args = settings()
    if args.world_size != {processes}:
        raise SystemExit(f"train.py is for {processes} processes, not {{args.world_size}}: export it with other --gpus")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with make_scorer(RECIPE, TASK) as scorer:
        trainer = Trainer(
            {argument},
            rewards(scorer),
            args,
            train_dataset=rows("train", tokenizer),
            eval_dataset={evaluation},
            processing_class=tokenizer,{peft}
        )
        trainer.train()
        trainer.save_model(str(HERE / "model-trained"))


if __name__ == "__main__":
    main()
'''


UNTOLD = {"what": "a reward function", "last": "", "scores": "scores", "correct": "", "functions": "reward"}
TOLD = {
    "what": "two reward functions",
    "last": "    last = {}\n",
    "scores": 'last["scores"]',
    "correct": """
    def correct(completions, **columns):  # of no weight: by it groups are dropped; TRL calls it right after the other
        return [float(solved) for solved in last["scores"].solved]
""",
    "functions": "[reward, correct]",
}


def script(config: Config, launch: Launch | None = None, title: str = "") -> str:
    """train.py; recipe.yaml has to lie beside it."""
    launch = Launch(fresh(config)) if launch is None else launch
    arguments, start = fields(config, launch), launch.start
    model, argument, peft, imports = start.model, "MODEL", "", ""
    if start.adapter:
        model, imports = start.adapter, "from peft import AutoPeftModelForCausalLM\n"
        argument = "AutoPeftModelForCausalLM.from_pretrained(MODEL, is_trainable=True)"
    elif config.peft.method is not None:
        peft = f"\n            peft_config=make_config({config.peft.method!r}, {config.peft.options!r}),"
    return SCRIPT.format(
        title=title,
        command=command(launch),
        began=f" From the {start.where}." if start.where else "",
        left_out="\n".join(f"  {line}" for line in left_out(config, launch)),
        peft_import=imports,
        rpg_import="from rpg.models.adapters import make_config\n" if peft else "",
        model=repr(Code('str(HERE / "model")') if model.startswith("$HERE") else model),
        before=start.step,
        each=recipe.steps_a_batch(config),
        problem=start.problem,
        count=start.steps_left(config) * config.rollout.prompts,
        fields="\n".join(f"        {name}={value!r}," for name, value in arguments.items()),
        processes=launch.processes,
        **(TOLD if tells_correct(config, method_of(config)) else UNTOLD),
        argument=argument,
        evaluation='{name: rows(name, tokenizer) for name in SETS if name != "train"}' if evaluated(config) else None,
        peft=peft,
    )
