"""A recipe as a command of verl: every setting by name, in the order of the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..integrations.verl.settings import AGG_MODES, PREFIX, settings
from ..loss.advantages import Advantage
from ..loss.methods import Method
from ..models.adapters import DEFAULTS
from ..run.config import Config
from ..training.samples.collect import signal_of
from ..training.setup import method_of
from . import recipe, verl_async
from .data import PLAIN
from .overrides import FOLDER, HERE, quoted, text
from .start import Launch, Start, fresh, is_adapter, lora_of

PROGRAM = "verl.trainer.main_ppo"
LOSS = "actor_rollout_ref.actor.policy_loss"
ENDLESS_EPOCHS = 1_000_000  # the steps end the run
VLLM = {  # options of vLLM that verl sets itself
    "gpu_memory_utilization": "gpu_memory_utilization",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill",
}
LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules")


@dataclass(frozen=True)
class VerlLaunch(Launch):
    """With what has been read of the problems and the model."""

    gpus: int = 8  # those that train, with ``sampling``
    sampling: verl_async.Samplers | None = None  # in the asynchronous trainer alone
    folder: str = FOLDER
    context: int | None = None  # tokens the model was made for
    chat: bool = True  # prompts go through the model's chat template
    in_order: bool = False  # the problems are written in the task's order
    tests: Sequence[str] = ("test.parquet",)  # files of the test sets
    settings_only: bool = False  # neither problems nor tokenizer were looked at: the last four are guesses


def export(config: Config, launch: VerlLaunch | None = None) -> dict[str, Any]:
    """Every setting of verl that the recipe decides; what cannot be expressed is a ValueError that names it."""
    launch = VerlLaunch(fresh(config)) if launch is None else launch
    method = method_of(config)
    _refuse(config, method)
    _refuse_adapter(config, launch.start, method.anchor)
    recipe.check_reference(launch.start, config, method.anchor, "verl")
    if launch.sampling is not None:
        verl_async.refuse(config, method)
    found = {
        **_data(config, launch),
        **_model(config, launch),
        **_algorithm(config, method),
        **_optim(config, launch),
        **_batches(config, launch),
        **_rollout(config, launch),
        **_reward(config, method, launch),
        **_trainer(config, launch),
    }
    if launch.sampling is None:
        return found
    return found | verl_async.settings(config, method, launch.sampling, launch.start.steps_left(config))


def _refuse(config: Config, method: Method) -> None:
    """What verl has no counterpart for and what would change the result."""
    options = {name: name != "trust_remote_code" for name in config.model_options}
    greedy = "its baseline is the reward of a greedy response to each prompt, which the plugin does not get"
    reasons = {
        f"algorithm={method.name}": method.only_here or (method.needs_greedy and greedy),
        "rollout.min_p": config.rollout.min_p > 0 and "give --rollout.min_p 0, with top_p or top_k in its place",
        "peft.base_bits": config.peft.base_bits is not None and "its base is held in 16 bits: leave it out",
        "peft.method": config.peft.method not in (None, "lora") and f"only lora there; got {config.peft.method}",
        **{f"model_options.{name}": bad and "give --model a folder that holds it" for name, bad in options.items()},
    }
    recipe.refuse(config, "verl", reasons)
    try:
        chosen = settings(method.name, _options(config, method))
    except ValueError as error:
        raise ValueError(f"algorithm={method.name} has no counterpart in verl: {error}") from error
    if config.rollout.old_logp == "engine" and chosen.needs_sampler:
        raise ValueError("rollout.old_logp=engine leaves loss.mismatch nothing to compare with: give one of them")


def _refuse_adapter(config: Config, start: Start, anchor: str) -> None:
    """verl's reference beside an adapter is the model without it."""
    for name, value in config.peft.options.items():
        if name not in LORA:
            raise ValueError(f"peft.options.{name} has no counterpart in verl: leave it out")
        if name == "lora_dropout" and value:
            raise ValueError(f"peft.options.lora_dropout={value} has no counterpart in verl: it must be 0")
        if start.adapter and name != "target_modules" and (was := lora_of(start.adapter).get(name)) != value:
            raise ValueError(f"peft.options.{name} is {value}, but {start.adapter} was made with {was}")
    if config.peft.method is None and start.adapter is None:
        return
    if anchor in ("every", "kl"):
        raise ValueError(
            f"reference.update={anchor} with LoRA has no counterpart in verl, whose reference is the model without its "
            "adapter: give --reference.update frozen or old, or train all weights"
        )
    if anchor == "frozen" and ((start.adapter and not start.step) or is_adapter(config.model)):
        raise ValueError(
            f"reference.update=frozen: verl's reference would be {start.model} without the adapter of {config.model}: "
            "give --reference.update old, or merge the adapter into a model first"
        )


# ---- section by section ----------------------------------------------------------------------------------------------


def _longest_prompt(config: Config, launch: VerlLaunch) -> int:
    """rpg train refuses a task whose longest prompt and response do not fit into the model: nothing is lost by it."""
    least = config.rollout.max_prompt_tokens
    return least if launch.context is None else max(1, min(least, launch.context - config.rollout.max_new_tokens))


def _data(config: Config, launch: VerlLaunch) -> dict[str, Any]:
    rollout = config.rollout
    return {
        "data.train_files": f"{launch.folder}/train.parquet",
        "data.val_files": [f"{launch.folder}/{name}" for name in launch.tests],
        "data.train_batch_size": rollout.prompts,
        "data.max_prompt_length": _longest_prompt(config, launch),
        "data.max_response_length": rollout.max_new_tokens,
        "data.filter_overlong_prompts": True,
        "data.shuffle": not launch.in_order,
        "data.seed": config.seed,
        **({"+data.apply_chat_template_kwargs": config.task.chat_options} if config.task.chat_options else {}),
    }


def _model(config: Config, launch: VerlLaunch) -> dict[str, Any]:
    start, prefix = launch.start, "actor_rollout_ref.model"
    out: dict[str, Any] = {f"{prefix}.path": start.model}
    if not launch.chat:
        out[f"{prefix}.custom_chat_template"] = PLAIN
    if config.model_options.get("trust_remote_code"):
        out |= {f"{prefix}.trust_remote_code": True, "data.trust_remote_code": True}
    out[f"{prefix}.enable_gradient_checkpointing"] = config.optim.recompute is not False
    if config.peft.method is not None or start.adapter is not None:
        lora = DEFAULTS["lora"] | config.peft.options if start.adapter is None else lora_of(start.adapter)
        out |= {
            f"{prefix}.lora_rank": lora["r"],
            f"{prefix}.lora_alpha": lora["lora_alpha"],
            f"{prefix}.target_modules": lora["target_modules"],
            "actor_rollout_ref.rollout.load_format": "safetensors",
        }
        if lora.get("exclude_modules"):
            out[f"{prefix}.exclude_modules"] = lora["exclude_modules"]
    if start.adapter is not None:
        out[f"{prefix}.lora_adapter_path"] = start.adapter
    short, dtype = ("fp32", "float32") if config.dtype == "float32" else ("bf16", "bfloat16")
    for engine in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config"):
        out[f"{engine}.model_dtype"] = "fp32"
        out[f"+{engine}.mixed_precision"] = {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        out[f"{engine}.dtype"] = dtype
    return out | {
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.fsdp_config.seed": config.seed,
        "actor_rollout_ref.rollout.dtype": dtype,
    }


def _options(config: Config, method: Method) -> dict[str, Any]:
    """Of the preset, as the plugin takes them: a recipe's ``loss``, and ``reference`` where it is not the default."""
    options = recipe.loss_options(config, method)
    if method.loss.reduction == "constant":
        options["constant"] = method.loss.constant
    reference = config.reference
    if method.anchor == "old":  # then nobody has to hold a reference
        if method.advantage.beta:  # a KL in the reward is 0: the estimator is the preset's, this is for its check
            options = recipe.with_advantage(options, beta=0.0)
        if "ref_logp" in method.loss.needs:
            options["needs"] = [name for name in method.loss.needs if name != "ref_logp"]
    if reference.update != "auto":
        used = {"every": ("every", "count"), "kl": ("kl", "smoothing", "count"), "ema": ("decay",)}
        names = used.get(reference.update, ())
        options["reference"] = {"update": reference.update} | {name: getattr(reference, name) for name in names}
    return options


def _algorithm(config: Config, method: Method) -> dict[str, Any]:
    """The preset by name, its options as the plugin takes them (docs/verl.md). verl's own KL in the loss and its
    entropy are off; the KL in the reward, where the method has one, is verl's."""
    reduction, anchored = method.loss.reduction, method.anchor != "old"
    in_reward = method.advantage.beta if anchored else 0.0
    out: dict[str, Any] = {
        "algorithm.adv_estimator": f"{PREFIX}{_estimator(config, method)}",
        f"{LOSS}.loss_mode": f"{PREFIX}{method.name}",
        **{f"+{LOSS}.rpg.{name}": value for name, value in _flat(_options(config, method))},
        "actor_rollout_ref.actor.loss_agg_mode": AGG_MODES[reduction],
        **({"actor_rollout_ref.actor.loss_scale_factor": method.loss.constant} if reduction == "constant" else {}),
        "actor_rollout_ref.actor.entropy_coeff": 0,
        "actor_rollout_ref.actor.use_kl_loss": anchored and method.loss.has_kl,
        "actor_rollout_ref.actor.kl_loss_coef": 0.0,
        "algorithm.use_kl_in_reward": in_reward > 0,
        "algorithm.rollout_correction.bypass_mode": config.rollout.old_logp == "engine",
    }
    if in_reward:
        out |= {"algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": in_reward, "algorithm.gamma": 1.0}
    if method.dynamic:
        metric = {"correct": "acc", "reward": "signal"}[signal_of(config)]
        out |= {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": metric}
    return out


def _estimator(config: Config, method: Method) -> str:
    """A kind by its name, where the recipe names one alone; else the preset's own, with its options."""
    given = config.loss.get("advantage")
    return given if isinstance(given, str) and Advantage(given) == method.advantage else method.name


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _optim(config: Config, launch: VerlLaunch) -> dict[str, Any]:
    optim, prefix = config.optim, "actor_rollout_ref.actor.optim"
    out: dict[str, Any] = {
        f"{prefix}.lr": optim.lr,
        f"{prefix}.betas": list(optim.betas),
        f"{prefix}.weight_decay": optim.weight_decay,
        f"{prefix}.clip_grad": optim.max_grad_norm,
        f"{prefix}.lr_scheduler_type": "constant",
        f"{prefix}.lr_warmup_steps": 0,
    }
    schedule = "linear" if optim.schedule == "auto" else optim.schedule
    if schedule == "constant" and optim.warmup <= 1:
        return out
    each = recipe.steps_a_batch(config)
    rate = {"schedule": schedule, "warmup": optim.warmup, "total": config.steps * each}
    return out | {
        f"{prefix}.optimizer": "ScheduledAdamW",
        f"{prefix}.optimizer_impl": "rpg.export.optim",
        f"{prefix}.override_optimizer_config": rate | {"begin": launch.start.step * each},
    }


def _batches(config: Config, launch: VerlLaunch) -> dict[str, Any]:
    rollout, optim = config.rollout, config.optim
    if rollout.prompts % optim.minibatches:
        raise ValueError(
            f"optim.minibatches={optim.minibatches} does not divide rollout.prompts={rollout.prompts}: verl's "
            "minibatches are of whole prompts"
        )
    prompts = rollout.prompts // optim.minibatches
    if prompts * rollout.samples % launch.processes:
        raise ValueError(
            f"rollout.prompts × samples / optim.minibatches = {prompts * rollout.samples} responses of an optimiser "
            f"step do not divide among {launch.processes} GPUs: give other --gpus, --nodes or --optim.minibatches"
        )
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    prefix = "actor_rollout_ref.actor"
    return {
        f"{prefix}.ppo_mini_batch_size": prompts,
        f"{prefix}.ppo_epochs": optim.epochs,
        f"{prefix}.shuffle": optim.epochs > 1,
        f"{prefix}.data_loader_seed": config.seed,
        f"{prefix}.use_dynamic_bsz": True,
        f"{prefix}.ppo_max_token_len_per_gpu": max(optim.micro_tokens or recipe.GPU_TOKENS, longest),
    }


def _rollout(config: Config, launch: VerlLaunch) -> dict[str, Any]:
    rollout, evaluation, prefix = config.rollout, config.eval, "actor_rollout_ref.rollout"
    each = recipe.tensor_parallel(config)
    if launch.sampling is not None:
        verl_async.check_sampling(config, launch.sampling)
    elif launch.processes % each or max(each, launch.gpus) % min(each, launch.gpus):
        nodes = f" on each of {launch.nodes} nodes" if launch.nodes > 1 else ""
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size={each} does not divide {launch.gpus} GPUs{nodes}: give other --gpus"
        )
    out: dict[str, Any] = {
        f"{prefix}.name": "vllm",
        f"{prefix}.n": rollout.samples,
        f"{prefix}.temperature": rollout.temperature,
        f"{prefix}.top_p": rollout.top_p,
        f"{prefix}.top_k": rollout.top_k or -1,
        f"{prefix}.seed": config.seed,
        f"{prefix}.calculate_log_probs": True,
        f"{prefix}.max_model_len": _longest_prompt(config, launch) + rollout.max_new_tokens,
        f"{prefix}.tensor_model_parallel_size": 1,
        f"{prefix}.val_kwargs.n": evaluation.k,
        f"{prefix}.val_kwargs.temperature": evaluation.temperature,
        f"{prefix}.val_kwargs.top_p": evaluation.top_p,
        f"{prefix}.val_kwargs.do_sample": evaluation.temperature > 0,
    }
    if rollout.slots is not None:
        out[f"{prefix}.max_num_seqs"] = rollout.slots
    for name, value in rollout.vllm.items():
        out[f"{prefix}.{VLLM[name]}" if name in VLLM else f"+{prefix}.engine_kwargs.vllm.{name}"] = value
    return out


def _reward(config: Config, method: Method, launch: VerlLaunch) -> dict[str, Any]:
    rollout = config.rollout
    out: dict[str, Any] = {
        "reward.custom_reward_function.path": f"{launch.folder}/reward.py",
        "reward.custom_reward_function.name": "compute_score",
    }
    if not method.overlong:
        return out
    if rollout.overlong_tokens >= rollout.max_new_tokens:
        raise ValueError(
            f"rollout.overlong_tokens must be below max_new_tokens, {rollout.max_new_tokens}; "
            f"got {rollout.overlong_tokens} (--rollout.overlong false: no penalty)"
        )
    zone = {"enable": True, "len": rollout.overlong_tokens, "penalty_factor": 1.0, "log": False}
    return out | {
        "reward.reward_manager.name": "dapo",
        "+reward.reward_kwargs": {"max_resp_len": rollout.max_new_tokens, "overlong_buffer_cfg": zone},
    }


def _trainer(config: Config, launch: VerlLaunch) -> dict[str, Any]:
    keep, steps = config.checkpoint, launch.start.steps_left(config)
    loggers, project, name = recipe.trackers(config)
    return {
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": ENDLESS_EPOCHS,
        "trainer.n_gpus_per_node": launch.gpus,
        "trainer.nnodes": launch.nodes,
        "trainer.val_before_train": True,
        "trainer.test_freq": config.eval.every or steps,
        "trainer.save_freq": -1 if keep.keep == 0 else keep.every or steps,
        "trainer.max_actor_ckpt_to_keep": keep.keep or None,
        "actor_rollout_ref.actor.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        "trainer.default_local_dir": f"{launch.folder}/checkpoints",
        "trainer.logger": ["console", *loggers],
        "trainer.project_name": project,
        "trainer.experiment_name": name,
    }


def left_out(config: Config, method: Method, launch: VerlLaunch) -> Iterator[str]:
    """What is not carried over, or is another thing in verl, though the run is the same without it."""
    rollout, optim, keep = config.rollout, config.optim, config.checkpoint
    if launch.start.step:
        yield "the optimiser's moments: AdamW starts afresh from the checkpoint's weights"
    if config.minutes is not None:
        yield f"minutes={config.minutes:g}: verl has no limit of time; the run ends after its steps"
    if config.tokens is not None:
        yield f"tokens={config.tokens:,}: verl has no limit of tokens; the run ends after its steps"
    if not launch.in_order:
        yield "the order of the problems: verl shuffles them itself, by the same seed but otherwise"
    if rollout.engine == "native":
        yield "rollout.engine=native: verl samples with vLLM, in weights of its own"
    if rollout.cache_dtype != "auto" or optim.offload:
        yield "rollout.cache_dtype, optim.offload: they are of rpg's own engine"
    if config.stale or rollout.choose != "passes":
        yield "rollout.ahead, rollout.choose, offpolicy: they are of rpg's own loop; --async is verl's way"
    if rollout.old_logp == "auto" and (launch.sampling is None or method.loss.needs_sampler):
        yield "rollout.old_logp=auto: recomputed by the trainer, as rpg train does with vLLM"
    if rollout.slots is None:
        yield "rollout.slots: verl's own default"
    if method.advantage.beta and method.anchor == "old":
        yield f"loss.beta={method.advantage.beta:g}: the KL in the reward is 0, as its anchor is the sampling policy"
    if method.min_signal and not method.dynamic:
        yield f"rollout.min_signal={method.min_signal:g}: verl drops groups without signal, or none"
    if method.dynamic:
        names = f"rollout.oversample={rollout.oversample:g}, rollout.max_rounds={rollout.max_rounds}"
        yield f"{names}: verl samples two prompts for each it dropped, until a batch is full"
    if optim.weight_decay:
        yield f"optim.weight_decay={optim.weight_decay:g}: verl's is on every parameter, rpg's on matrices alone"
    yield f"optim.max_bad_steps={optim.max_bad_steps}: verl skips steps that are not finite without counting them"
    if keep.best and keep.keep:
        yield "checkpoint.best: verl keeps the newest"
    if config.log.record is not None:
        yield f"log.record={config.log.record}: actor.policy_loss.rpg has record=FILE and record_step"
    yield f"log.view, log.report, log.samples={config.log.samples}, device: they have no meaning there"
    if launch.sampling is not None:
        yield from verl_async.left_out(config, method)
    yield "minibatches: of the same size, but verl balances lengths and does not keep groups together"


# ---- as text ---------------------------------------------------------------------------------------------------------

ONLY_SETTINGS = """\
# --settings-only: to read, not to run. Without the problems and the tokenizer nobody knew data.val_files, data.shuffle,
# data.max_prompt_length and the chat template; train.parquet, the test sets and reward.py are not here.
echo "$0 has the settings alone: export without --settings-only to train" >&2
exit 1
"""


def run_sh(config: Config, launch: VerlLaunch, title: str) -> str:
    """The script: one setting a line."""
    lines = " \\\n  ".join(quoted(f"{name}={text(value)}") for name, value in export(config, launch).items())
    notes = "".join(f"#   {line}\n" for line in left_out(config, method_of(config), launch))
    began = f"# From the {launch.start.where}.\n" if launch.start.where else ""
    program, options = (PROGRAM, "") if launch.sampling is None else (verl_async.PROGRAM, " --async")
    return f"""#!/usr/bin/env bash
# {title}
{began}# Written by rpg export verl{options}. Every node needs rpg and verl, and has to see this folder.
# Not carried over:
{notes}{ONLY_SETTINGS if launch.settings_only else ""}set -euo pipefail
{HERE}exec python -m {program} \\
  {lines} \\
  "$@"
"""
