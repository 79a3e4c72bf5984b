"""What a run is: one dataclass, a section a part. YAML and flags have the same names (``--rollout.temperature``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from ..loss import OTHER_NAMES as LOSS_NAMES
from .settings import AUTO, Bound, OrAuto, check_bounds

FROM_0 = Bound("at least 0", lambda x: 0 <= x < math.inf)
FROM_1 = Bound("at least 1", lambda x: 1 <= x < math.inf)
FINITE = Bound("finite", math.isfinite)
OR_AUTO = OrAuto()
BILLION = Bound("at most 1,000,000,000", lambda x: x <= 10**9)
MILLION = Bound("at most 1,000,000", lambda x: x <= 10**6)
QUADRILLION = Bound("at most 10^15", lambda x: x <= 10**15)
Natural = Annotated[int, FROM_0, BILLION]
Count = Annotated[int, FROM_1, BILLION]
NonNegative = Annotated[float, FROM_0]
Positive = Annotated[float, Bound("positive", lambda x: x > 0)]
Probability = Annotated[float, Bound("above 0 and at most 1", lambda x: 0 < x <= 1)]
Share = Annotated[float, Bound("from 0 to 1", lambda x: 0 <= x <= 1)]
Decay = Annotated[float, Bound("at least 0 and below 1", lambda x: 0 <= x < 1)]


@dataclass(frozen=True)
class TaskConfig:
    name: str = "arithmetic"
    """arithmetic, countdown or mixed (built in); a dataset (gsm8k, math, dapo-math-17k, …: `rpg tasks`); a .jsonl,
    .json or .parquet file; a hub dataset, org/name[@subset][#split]; gym:GENERATOR; my_task.py:make; several with
    weights: 0.7*gsm8k + 0.3*math"""
    test: str | None = None
    """problems to evaluate on: tasks, datasets or files, several with commas (aime24, aime25); None: the task's own"""
    aside: Natural = 0
    """evaluate on so many of the problems to train on, which are set aside, instead of the test problems: for choosing
    settings, as rpg study does; 0: the test problems"""
    prompt_key: str | None = None
    """column of the prompt in files and hub datasets; None: the usual names are tried"""
    answer_key: str | None = None
    """column of the answer"""
    rewards: dict[str, float] = field(default_factory=dict)
    """parts of the reward and their weights: correct, format, and functions of your own by name, as in
    --task.rewards.correct 1 --task.rewards.my_reward.py:score 0.5; empty: the task's own reward"""
    reward: str | None = None
    """the only reward, a function of your own: my_reward.py:score, called as score(response, answer, prompt)"""
    verifier: Literal["strict", "lenient"] = "strict"
    """who says that an answer is right: rpg's own rules, or math-verify, for figures that are compared with its own"""
    template: str | None = None
    """prompt template: text with {prompt} in it, @file.txt, or one of plain, boxed, answer, think; None: the dataset's;
    prompts of datasets that say themselves how to answer are left as they are"""
    system: str | None = None
    """system prompt, in the model's chat template; '': none; None: the dataset's"""
    chat: bool | None = None
    """wrap prompts in the model's chat template; None: if the model has one"""
    chat_options: dict[str, Any] = field(default_factory=dict)
    """given to the chat template: --task.chat_options.enable_thinking false"""
    timeout: Annotated[Positive, MILLION] = 5.0
    """seconds a reward function may take for one response"""
    memory_gb: Annotated[Positive, MILLION] = 4.0
    """memory a reward function may take for one response, beyond what its imports took"""
    on_error: Annotated[float, FINITE] = 0.0
    """reward of a response whose reward function raised, hung or returned no finite number"""
    workers: Annotated[Count, Bound("at most 1,000", lambda x: x <= 1000)] = 2
    """processes that run reward functions"""


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["native", "vllm"] = "native"
    """what samples: the trainer's own weights, or vLLM (extra: vllm), updated in place at each step"""
    vllm: dict[str, Any] = field(default_factory=dict)
    """given to vLLM's LLM(): --rollout.vllm.gpu_memory_utilization 0.4"""
    end_tokens: str | None = None
    """tokens that end a response besides the model's own, separated by spaces"""
    prompts: Count = 32
    """prompts (groups) in one step"""
    samples: Count = 8
    """responses to each prompt"""
    max_prompt_tokens: Count = 512
    """longer training prompts are left out, with a warning; a longer held-out one is an error"""
    max_new_tokens: Annotated[Count, OR_AUTO] = AUTO
    """length at which a response is cut; auto: 80 for the built-in model, else 1024, 2048 for competition mathematics,
    4096 for a model that thinks before it answers, or what the model's context leaves"""
    temperature: Annotated[Positive, FINITE] = 1.0
    """of the sampling distribution; the policy that is trained is this tempered one"""
    top_p: Probability = 1.0
    """nucleus sampling: from the fewest tokens whose probabilities reach this; what is trained is the policy over the
    tokens kept, with top_k and min_p too"""
    top_k: Natural = 0
    """sample from the k most probable tokens only; 0: all"""
    min_p: Share = 0.0
    """sample from the tokens that have at least this share of the largest probability; 0: all"""
    slots: Count | None = None
    """sequences decoded at the same time; finished ones are replaced at once; None: 256 on a CPU, on a GPU as many as
    its memory has room for, at most 1024 (see optim.offload)"""
    cache_dtype: Literal["auto", "fp8"] = "auto"
    """of keys and values while sampling, native engine: auto: the model's; fp8: 8 bits with a scale for each token and
    head, half the memory and half the reading; old log-probabilities are then recomputed, and samples weighted by
    ρ = old/engine unless loss.mismatch says otherwise"""
    ahead: Annotated[NonNegative, Bound("at most 100", lambda x: x <= 100)] = 0.0
    """how far sampling may run ahead, in batches: so many groups more than a step needs are under way, they go on with
    the new weights, and a step takes those that end first; 0: a step samples its own groups and waits for the last"""
    cache: Literal["recomputed", "kept"] = "recomputed"
    """with ahead: keys and values of responses under way, when the weights have changed: of the new weights, or as they
    were; each token's log-probability is what it was drawn with in either case"""
    choose: Literal["passes", "signal"] = "passes"
    """which prompts: each once a pass; or those that lately gave no signal rarely, none never"""
    old_logp: Literal["auto", "engine", "recompute"] = "auto"
    """old log-probabilities: the engine's, or recomputed by the trainer; auto: the native engine's in float32, and
    in bfloat16 as long as the measured difference is harmless; with vLLM always recomputed"""
    dynamic: bool | None = None
    """drop groups without signal and sample others instead; None: as the algorithm was published"""
    dynamic_by: Literal["auto", "correct", "reward"] = "auto"
    """a group has signal if its responses differ in what counts as solved (correct), or in their reward, the overlong
    penalty aside; auto: correct, where the task or a part of task.rewards says what is correct, else reward"""
    min_signal: Share | None = None
    """without dynamic sampling: sample more groups while fewer than this share have signal, and train on those that
    have it first; None: as the algorithm was published (gpg: 0.6, others: 0)"""
    oversample: Annotated[float, FROM_1, Bound("at most 1,000", lambda x: x <= 1000)] = 1.25
    """with dynamic sampling: prompts sampled for each one still wanted, from what earlier steps kept of theirs"""
    max_rounds: Count = 4
    """with dynamic sampling or min_signal: rounds after which a step goes on with the groups it has"""
    overlong: bool | None = None
    """soft overlong penalty; None: as the algorithm was published"""
    overlong_tokens: Count = 16
    """length of the zone before max_new_tokens in which the penalty grows from 0 to 1"""


@dataclass(frozen=True)
class OffPolicyConfig:
    reuse: Count = 1
    """steps that train on a group; above 1 a step samples fewer new ones, and earlier ones serve again with exact
    weights"""
    max_age: Count = 8
    """steps after which a group serves no more"""
    min_ess: Share = 0.0
    """groups whose samples have less effective sample size, from their weights under the policy as it is now, are
    dropped, and sampling runs less far ahead; 0: none"""
    max_kl: Positive | None = None
    """the same for a larger KL per token between what sampled and the policy as it is now; None: none"""


@dataclass(frozen=True)
class PeftConfig:
    method: str | None = None
    """train an adapter instead of the model: lora, or another method of PEFT (extra: peft) by its name;
    where the KL's anchor is the initial model, that is the model with the adapter off"""
    options: dict[str, Any] = field(default_factory=dict)
    """of that method's config in PEFT: --peft.options.r 16 --peft.options.target_modules all-linear"""
    base_bits: Literal[4] | None = None
    """4: the frozen weights of the layers are held in 4 bits (NF4), a quarter of their memory, beside a LoRA of dtype;
    None: in dtype"""


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "schedule-free"] = "adamw"
    """optimiser"""
    lr: Annotated[NonNegative, OR_AUTO] = AUTO
    """learning rate; auto: 5e-4 for the built-in model, 1e-6 for all weights of a pretrained one, 3e-5 for an adapter
    of one"""
    warmup: Natural = 5
    """optimiser steps over which the learning rate rises from 0"""
    schedule: Literal["auto", "constant", "linear", "cosine"] = "auto"
    """after warm-up; linear and cosine fall to a tenth at the last step, or where the tokens end, if that comes first;
    a run that its minutes end has fallen only so far; auto: linear, constant with schedule-free"""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's; schedule-free takes the first as its interpolation"""
    weight_decay: NonNegative = 0.0
    """decoupled"""
    max_grad_norm: Positive = 1.0
    """gradients are scaled down to this norm"""
    minibatches: Count = 4
    """optimiser steps over one batch of rollouts"""
    epochs: Count = 1
    """times each rollout is used"""
    micro_tokens: Count | None = None
    """tokens in one forward and backward pass, padding included where there is any; changes memory and speed, not the
    gradient; None: 1024 on a CPU, where activations then stay in its cache; on a GPU what fits, at most 32768"""
    recompute: bool | None = None
    """recompute activations in the backward pass: less memory, a third more arithmetic; None: where they do not fit"""
    offload: bool | None = None
    """float32 weights and moments lie in host memory while responses are sampled, and the engine's cache is given back
    while the model is trained; None: where that lets many more rows be sampled at once"""
    max_bad_steps: Count = 3
    """optimiser steps in a row with a loss or gradient that is not finite, after which the run stops"""


@dataclass(frozen=True)
class ReferenceConfig:
    update: Literal["auto", "old", "every", "kl", "ema", "frozen"] = "auto"
    """the KL's anchor: old (the sampling policy; no second model is held), a copy renewed every K steps, when the KL to
    it passes a target, as a moving average (ema), or never (frozen); auto: as the algorithm was published"""
    every: Count = 10
    """update=every: iterations or optimiser steps between renewals, as reference.count says"""
    count: Literal["iterations", "optimizer-steps"] = "iterations"
    """what every and smoothing count: iterations (batches of rollouts), or optimiser steps, as the RPG paper does; the
    copy is renewed at the end of the iteration in which it is due"""
    kl: Positive = 0.05
    """update=kl: renewed when the moving average of the KL per token passes this"""
    smoothing: Decay = 0.9
    """update=kl: weight of the past in that moving average, which is divided by what it has seen since the renewal"""
    decay: Decay = 0.99
    """update=ema: weight of the past at each step"""
    model: str | None = None
    """another model as the anchor, a teacher: a model folder, a hub id, or a run, whose newest checkpoint is meant; it
    must know the trained model's tokens, never changes, and is no part of the checkpoints"""

    @property
    def rule(self) -> str:
        """``update``, as a teacher leaves it."""
        return self.update if self.model is None else "frozen"


@dataclass(frozen=True)
class EvalConfig:
    every: Natural = 10
    """steps between evaluations; 0: none but the first and the last"""
    problems: Count = 128
    """held-out problems"""
    k: Count = 8
    """responses to each: mean@k and pass@1 … pass@k"""
    temperature: NonNegative = 1.0
    """of the responses"""
    top_p: Probability = 1.0
    """of the responses"""


@dataclass(frozen=True)
class CheckpointConfig:
    every: Natural = 10
    """steps between checkpoints; 0: only when the run ends or is stopped"""
    keep: Natural = 2
    """newest checkpoints that stay, besides the best; 0: none is written, not even when the run ends"""
    best: bool = True
    """keep the checkpoint of the best evaluation too"""


@dataclass(frozen=True)
class LogConfig:
    tensorboard: bool = True
    """event files in the run's folder"""
    wandb: str | None = None
    """Weights & Biases project (extra: wandb)"""
    trackio: str | None = None
    """trackio project (extra: trackio)"""
    samples: Natural = 2
    """groups of responses written to samples.jsonl at each step"""
    report: bool = True
    """write report.html when the run ends"""
    view: Literal["auto", "live", "plain", "none"] = "auto"
    """terminal: live on a terminal, else plain lines"""
    record: str | None = None
    """steps of which the last optimiser step is written down, batch and weights, for rpg replay; several with commas:
    10,40"""

    @property
    def recorded_steps(self) -> tuple[int, ...]:
        parts = (self.record or "").replace(",", " ").split()
        if not all(part.isdecimal() and int(part) for part in parts):
            got = repr(self.record)[:40]
            raise ValueError(f"log.record must be steps, counted from 1, with commas as in 10,40; got {got}")
        return tuple(map(int, parts))


# What TRL, verl, OpenRLHF and others call them: for "did you mean"
OTHER_NAMES = {
    "algorithm": "algo method loss_type loss_mode adv_estimator advantage_estimator",
    **{f"loss.{option}": f"{option} {others}" for option, others in LOSS_NAMES.items()},
    "model": "model_name model_path model_name_or_path pretrain base_model",
    "dtype": "torch_dtype precision bf16 fp16 fp32",
    "device": "gpu cuda",
    "steps": "max_steps num_steps train_steps total_steps num_train_steps total_training_steps iterations max_iters",
    "minutes": "time_limit max_time",
    "tokens": "max_train_tokens token_budget total_tokens num_tokens",
    "output": "output_dir out_dir save_path save_dir logdir default_local_dir",
    "resume": "resume_from resume_from_checkpoint resume_mode load_checkpoint",
    "task.name": "task dataset dataset_name train_files train_file prompt_data data",
    "task.test": "eval_dataset test_dataset val_files test_file",
    "task.reward": "reward_func reward_funcs reward_fn reward_function custom_reward_function",
    "task.rewards.correct": "reward_weights",
    "task.system": "system_prompt",
    "task.template": "prompt_template input_template",
    "rollout.prompts": "batch_size train_batch_size rollout_batch_size per_device_train_batch_size num_prompts",
    "rollout.samples": "n group group_size num_generations num_samples n_samples_per_prompt num_return_sequences",
    "rollout.max_new_tokens": "max_tokens max_length max_completion_length max_response_length generate_max_len",
    "rollout.max_prompt_tokens": "max_prompt_length max_prompt_len prompt_max_len",
    "rollout.engine": "use_vllm vllm_mode backend",
    "rollout.ahead": "async async_rollout async_training staleness max_staleness staleness_threshold max_async_level "
    "async_steps max_off_policy_steps",
    "rollout.cache": "partial_rollout",
    "offpolicy.reuse": "replay_buffer_size replay num_reuse",
    "offpolicy.max_age": "max_head_offpolicyness max_lag",
    "rollout.dynamic": "dynamic_sampling dynamic_filtering filter_groups",
    "optim.lr": "learning_rate actor_learning_rate",
    "optim.name": "optimizer",
    "optim.schedule": "lr_scheduler lr_scheduler_type scheduler",
    "optim.warmup": "warmup_steps warmup_ratio lr_warmup_steps",
    "optim.betas": "adam_beta1 adam_beta2 adam_betas",
    "optim.max_grad_norm": "clip_grad grad_clip gradient_clipping max_norm",
    "optim.minibatches": "num_mini_batches num_minibatches mini_batch_size ppo_mini_batch_size",
    "optim.epochs": "num_iterations ppo_epochs num_ppo_epochs num_epochs",
    "optim.micro_tokens": "micro_batch_size gradient_accumulation_steps ppo_max_token_len_per_gpu max_tokens_per_gpu",
    "rollout.cache_dtype": "kv_cache_dtype cache_type kv_cache_quantization",
    "optim.offload": "optimizer_offload offload_optimizer cpu_offload adam_offload enable_sleep_mode",
    "optim.recompute": "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing",
    "reference.model": "ref_model ref_model_path",
    "reference.update": "sync_ref_model",
    "reference.every": "ref_model_sync_steps",
    "reference.decay": "ref_model_mixup_alpha ema_decay",
    "peft.method": "lora use_lora use_peft peft_config",
    "peft.base_bits": "load_in_4bit qlora use_qlora quantization quantize",
    "peft.options.r": "rank lora_r lora_rank",
    "peft.options.lora_alpha": "lora_alpha",
    "peft.options.target_modules": "lora_target_modules target_modules",
    "eval.every": "eval_steps eval_interval test_freq",
    "checkpoint.every": "save_steps save_interval save_freq",
    "checkpoint.keep": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep",
    "log.wandb": "use_wandb wandb_project project_name report_to",
}

# And what they set, and nothing here does
WHOLE_IN_VLLM = "peft.base_bits goes with rollout.engine native: vLLM would hold the model whole, in 16 bits"
_GPUS = "torchrun starts a process a GPU (docs/multi-gpu.md)"
NOT_SET = {
    "logging_steps": "every step is logged; --eval.every is for evaluations, --log.view for what the terminal shows",
    "n_gpus_per_node": _GPUS,
    "num_processes": _GPUS,
    "num_gpus": _GPUS,
}


@dataclass(frozen=True)
class Config:
    algorithm: str = "rpg-reinforce-urkl"
    """a preset of `rpg algorithms`"""
    loss: dict[str, Any] = field(default_factory=dict)
    """options of the preset, as `rpg algorithms NAME` lists them: --loss.beta 1e-3 --loss.high 0.3"""
    model: str = "builtin"
    """builtin, a Hugging Face folder or hub id, or a .gguf file, local or as org/name/file.gguf (dequantised)"""
    model_options: dict[str, Any] = field(default_factory=dict)
    """given to from_pretrained: --model_options.revision main"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the weights and the arithmetic; with bfloat16 the optimiser keeps float32 weights and moments; auto: bfloat16
    on a GPU that has it, else float32"""
    device: str = "auto"
    """cpu, cuda or gpu (the same), cuda:1, …; auto: cuda if there is one, else cpu"""
    steps: Natural = 50
    """batches of rollouts"""
    minutes: Positive | None = None
    """end after so many minutes, evaluations and checkpoints not counted, if the steps are not done before"""
    tokens: Annotated[int, FROM_1, QUADRILLION] | None = None
    """end after the step in which so many tokens of responses have been sampled for training, if the steps are not done
    before; a falling learning rate then falls with the tokens, where that is faster than with the steps"""
    seed: Annotated[int, FROM_0] = 0
    """decides the prompts and every sampled token"""
    insist: bool = False
    """train even with a learning rate that is known to ruin such a model"""
    output: str = "auto"
    """the run's folder; auto: a new one in runs/, as runs/grpo-1, runs/grpo-2; runs/latest leads to the latest"""
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    offpolicy: OffPolicyConfig = OffPolicyConfig()
    peft: PeftConfig = field(default_factory=PeftConfig)
    optim: OptimConfig = OptimConfig()
    reference: ReferenceConfig = ReferenceConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    other_names: ClassVar[dict[str, str]] = OTHER_NAMES
    not_set: ClassVar[dict[str, str]] = NOT_SET

    def __post_init__(self) -> None:
        check(self)

    @property
    def stale(self) -> bool:
        """Whether a step may train on samples of an earlier policy."""
        return self.rollout.ahead > 0 or self.offpolicy.reuse > 1


def check(config: Config) -> None:
    """Refuse what no run can mean, with one line that names the setting."""
    rollout, optim = config.rollout, config.optim
    check_bounds(config)
    if max(config.log.recorded_steps, default=0) > config.steps:
        raise ValueError(f"log.record={str(config.log.record)[:40]} is beyond the last step: steps={config.steps}")
    if optim.minibatches > (most := rollout.prompts * rollout.samples):
        raise ValueError(
            f"optim.minibatches must be at most rollout.prompts × samples, {most}; got {optim.minibatches}"
        )
    most = rollout.max_new_tokens
    if rollout.overlong and most != AUTO and rollout.overlong_tokens > most:
        raise ValueError(
            f"rollout.overlong_tokens must be at most max_new_tokens, {most}; got {rollout.overlong_tokens}"
        )
    if rollout.engine == "vllm" and rollout.cache_dtype != "auto":
        raise ValueError(
            "rollout.cache_dtype is the native engine's: give vLLM its own, --rollout.vllm.kv_cache_dtype fp8"
        )
    if rollout.ahead:
        if rollout.engine == "vllm":
            raise ValueError("rollout.ahead needs rollout.engine native: vLLM gives whole responses")
        if rollout.top_p < 1 or rollout.top_k or rollout.min_p:
            raise ValueError("rollout.ahead needs rollout.top_p 1, top_k 0 and min_p 0: kept sets are of one policy")
    if rollout.choose == "signal" and rollout.samples < 2:
        raise ValueError("rollout.choose=signal needs rollout.samples of at least 2: one alone differs from none")
    if rollout.engine == "vllm" and config.peft.base_bits is not None:
        raise ValueError(WHOLE_IN_VLLM)
    if rollout.engine == "vllm" and optim.offload:
        raise ValueError("optim.offload goes with rollout.engine native: vLLM keeps its own weights and cache")
    if rollout.cache_dtype != "auto" and rollout.old_logp == "engine":
        raise ValueError(
            f"rollout.old_logp must be auto or recompute with rollout.cache_dtype={rollout.cache_dtype}, which rounds "
            "what the engine computes"
        )
    if optim.name == "schedule-free" and optim.schedule not in ("auto", "constant"):
        raise ValueError(
            f"optim.schedule must be constant with schedule-free, which averages instead; got {optim.schedule}"
        )
    if optim.name == "schedule-free" and optim.betas[0] == 0:
        raise ValueError("optim.betas must start above 0 with schedule-free: it is the weight of the average")
    if config.reference.model is not None and config.reference.update not in ("auto", "frozen"):
        raise ValueError(
            f"reference.update must be auto or frozen with reference.model, which never changes; "
            f"got {config.reference.update}"
        )
    for name, text in {
        "model": config.model,
        "reference.model": config.reference.model or "x",
        "output": config.output,
        "task.name": config.task.name,
    }.items():
        if not text.strip():
            raise ValueError(f"{name} must not be empty")
