"""What a run is: one dataclass, a section a part. YAML and flags have the same names (``--rollout.temperature``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class TaskConfig:
    name: str = "arithmetic"
    """arithmetic, countdown or mixed (built in); a dataset (gsm8k, math, dapo-math-17k, …: `rpg tasks`); a .jsonl,
    .json or .parquet file; a hub dataset, org/name[@subset][#split]; gym:GENERATOR; my_task.py:make; several with
    weights: 0.7*gsm8k + 0.3*math"""
    test: str | None = None
    """problems to evaluate on: tasks, datasets or files, several with commas (aime24, aime25); None: the task's own"""
    prompt_key: str | None = None
    """column of the prompt in files and hub datasets; None: the usual names are tried"""
    answer_key: str | None = None
    """column of the answer"""
    rewards: dict[str, float] = field(default_factory=dict)
    """parts of the reward and their weights: correct, format, and functions of your own by name, as in
    --task.rewards.correct 1 --task.rewards.my_reward.py:score 0.5; empty: the task's own reward"""
    reward: str | None = None
    """the only reward, a function of your own: my_reward.py:score, called as score(response, answer, prompt)"""
    template: str | None = None
    """prompt template: text with {prompt} in it, @file.txt, or one of plain, boxed, answer, think; None: the dataset's;
    prompts of datasets that say themselves how to answer are left as they are"""
    system: str | None = None
    """system prompt, in the model's chat template; '': none; None: the dataset's"""
    chat: bool | None = None
    """wrap prompts in the model's chat template; None: if the model has one"""
    chat_options: dict[str, Any] = field(default_factory=dict)
    """given to the chat template: --task.chat_options.enable_thinking false"""
    timeout: float = 5.0
    """seconds a reward function may take for one response"""
    memory_gb: float = 4.0
    """memory a reward function may take for one response, beyond what its imports took"""
    on_error: float = 0.0
    """reward of a response whose reward function raised, hung or returned no finite number"""
    workers: int = 2
    """processes that run reward functions"""


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["native", "vllm"] = "native"
    """what samples: the trainer's own weights, or vLLM (pip install rpg-rl[vllm]), updated in place at each step"""
    vllm: dict[str, Any] = field(default_factory=dict)
    """given to vLLM's LLM(): --rollout.vllm.gpu_memory_utilization 0.4"""
    end_tokens: str | None = None
    """tokens that end a response besides the model's own, separated by spaces"""
    prompts: int = 32
    """prompts (groups) in one step"""
    samples: int = 8
    """responses to each prompt"""
    max_prompt_tokens: int = 512
    """longer training prompts are left out, with a warning; a longer held-out one is an error"""
    max_new_tokens: int = 80
    """length at which a response is cut"""
    temperature: float = 1.0
    """of the sampling distribution; the policy that is trained is this tempered one"""
    top_p: float = 1.0
    """nucleus sampling; the log-probabilities are those of the truncated distribution"""
    top_k: int = 0
    """sample from the k most probable tokens only; 0: all"""
    slots: int | None = None
    """sequences decoded at the same time; finished ones are replaced at once; None: 256 on a CPU, on a GPU 1024 or what
    half of the memory that training leaves has room for"""
    old_logp: Literal["auto", "engine", "recompute"] = "auto"
    """old log-probabilities: the engine's, or computed anew by the trainer; auto: the native engine's in float32, and
    in bfloat16 as long as the measured difference is harmless; with vLLM always anew"""
    dynamic: bool | None = None
    """drop groups whose rewards are all equal and sample others instead; None: as the algorithm was published"""
    oversample: float = 1.25
    """with dynamic sampling: prompts sampled for each one still wanted, from what earlier steps kept of theirs"""
    max_rounds: int = 4
    """with dynamic sampling: rounds after which a step goes on with the groups it has"""
    overlong: bool | None = None
    """soft overlong penalty; None: as the algorithm was published"""
    overlong_tokens: int = 16
    """length of the zone before max_new_tokens in which the penalty grows from 0 to 1"""


@dataclass(frozen=True)
class PeftConfig:
    method: str | None = None
    """train an adapter instead of the model: lora, or another method of PEFT (pip install rpg-rl[peft]) by its name;
    where the KL's anchor is the initial model, that is the model with the adapter off"""
    options: dict[str, Any] = field(default_factory=dict)
    """of that method's config in PEFT: --peft.options.r 16 --peft.options.target_modules all-linear"""


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "schedule-free"] = "adamw"
    """optimiser"""
    lr: float = 5e-4
    """learning rate"""
    warmup: int = 5
    """optimiser steps over which the learning rate rises from 0"""
    schedule: Literal["auto", "constant", "linear", "cosine"] = "auto"
    """after warm-up; linear and cosine fall to a tenth at the last step; auto: linear, constant with schedule-free"""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's; schedule-free takes the first as its interpolation"""
    weight_decay: float = 0.0
    """decoupled"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm"""
    minibatches: int = 4
    """optimiser steps over one batch of rollouts"""
    epochs: int = 1
    """times each rollout is used"""
    micro_tokens: int | None = None
    """tokens in one forward and backward pass, padding included where there is any; changes memory and speed, not the
    gradient; None: 1024 on a CPU, where activations then stay in its cache; on a GPU what fits, at most 32768"""
    recompute: bool | None = None
    """recompute activations in the backward pass: less memory, a third more arithmetic; None: where they do not fit"""
    max_bad_steps: int = 3
    """optimiser steps in a row with a loss or gradient that is not finite, after which the run stops"""


@dataclass(frozen=True)
class ReferenceConfig:
    update: Literal["auto", "old", "every", "kl", "ema", "frozen"] = "auto"
    """the KL's anchor: old (the sampling policy; no second model is held), a copy renewed every K steps, when the KL to
    it passes a target, as a moving average (ema), or never (frozen); auto: as the algorithm was published"""
    every: int = 10
    """update=every: steps between renewals"""
    kl: float = 0.05
    """update=kl: renewed when the moving average of the KL per token passes this"""
    smoothing: float = 0.9
    """update=kl: weight of the past in that moving average"""
    decay: float = 0.98
    """update=ema: weight of the past at each step"""


@dataclass(frozen=True)
class EvalConfig:
    every: int = 10
    """steps between evaluations; 0: none but the first and the last"""
    problems: int = 128
    """held-out problems"""
    k: int = 8
    """responses to each: mean@k and pass@1 … pass@k"""
    temperature: float = 1.0
    """of the responses"""
    top_p: float = 1.0
    """of the responses"""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 10
    """steps between checkpoints; 0: only when the run ends or is stopped"""
    keep: int = 2
    """newest checkpoints that stay, besides the best; 0: none is written, not even when the run ends"""
    best: bool = True
    """keep the checkpoint of the best evaluation too"""


@dataclass(frozen=True)
class LogConfig:
    tensorboard: bool = True
    """event files in the run's folder"""
    wandb: str | None = None
    """Weights & Biases project (pip install rpg-rl[wandb])"""
    trackio: str | None = None
    """trackio project (pip install rpg-rl[trackio])"""
    samples: int = 2
    """groups of responses written to samples.jsonl at each step"""
    report: bool = True
    """write report.html when the run ends"""
    view: Literal["auto", "live", "plain", "none"] = "auto"
    """terminal: live on a terminal, else plain lines"""


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
    """auto: cuda if there is one, else cpu"""
    steps: int = 50
    """batches of rollouts"""
    minutes: float | None = None
    """end after so many minutes, evaluations and checkpoints not counted, if the steps are not done before"""
    seed: int = 0
    """decides the prompts and every sampled token"""
    output: str = "runs/latest"
    """the run's folder"""
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    optim: OptimConfig = OptimConfig()
    reference: ReferenceConfig = ReferenceConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        check(self)


def check(config: Config) -> None:
    """Refuse what no run can mean, with one line that names the setting."""
    rollout, optim, reference, evaluation = config.rollout, config.optim, config.reference, config.eval
    at_least = {
        "steps": (config.steps, 0),
        "seed": (config.seed, 0),
        "task.workers": (config.task.workers, 1),
        "rollout.prompts": (rollout.prompts, 1),
        "rollout.samples": (rollout.samples, 1),
        "rollout.max_prompt_tokens": (rollout.max_prompt_tokens, 1),
        "rollout.max_new_tokens": (rollout.max_new_tokens, 1),
        "rollout.top_k": (rollout.top_k, 0),
        "rollout.slots": (1 if rollout.slots is None else rollout.slots, 1),
        "rollout.oversample": (rollout.oversample, 1),
        "rollout.max_rounds": (rollout.max_rounds, 1),
        "rollout.overlong_tokens": (rollout.overlong_tokens, 1),
        "optim.lr": (optim.lr, 0),
        "optim.warmup": (optim.warmup, 0),
        "optim.weight_decay": (optim.weight_decay, 0),
        "optim.minibatches": (optim.minibatches, 1),
        "optim.epochs": (optim.epochs, 1),
        "optim.micro_tokens": (1 if optim.micro_tokens is None else optim.micro_tokens, 1),
        "optim.max_bad_steps": (optim.max_bad_steps, 1),
        "reference.every": (reference.every, 1),
        "eval.every": (evaluation.every, 0),
        "eval.problems": (evaluation.problems, 1),
        "eval.k": (evaluation.k, 1),
        "eval.temperature": (evaluation.temperature, 0),
        "checkpoint.every": (config.checkpoint.every, 0),
        "checkpoint.keep": (config.checkpoint.keep, 0),
        "log.samples": (config.log.samples, 0),
    }
    for name, (value, least) in at_least.items():
        if not least <= value < float("inf"):
            raise ValueError(f"{name} must be at least {least}; got {value}")
    positive = {
        "minutes": 1.0 if config.minutes is None else config.minutes,
        "task.timeout": config.task.timeout,
        "task.memory_gb": config.task.memory_gb,
        "rollout.temperature": rollout.temperature,
        "optim.max_grad_norm": optim.max_grad_norm,  # infinite: no clipping
        "reference.kl": reference.kl,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive; got {value}")
    for name, value in {"rollout.top_p": rollout.top_p, "eval.top_p": evaluation.top_p}.items():
        if not 0 < value <= 1:
            raise ValueError(f"{name} must be above 0 and at most 1; got {value}")
    shares = {
        "optim.betas": optim.betas,
        "reference.smoothing": [reference.smoothing],
        "reference.decay": [reference.decay],
    }
    for name, values in shares.items():
        if not all(0 <= value < 1 for value in values):
            raise ValueError(f"{name} must be at least 0 and below 1; got {', '.join(map(str, values))}")
    if not abs(config.task.on_error) < float("inf"):
        raise ValueError(f"task.on_error must be finite; got {config.task.on_error}")
    if not rollout.temperature < float("inf"):
        raise ValueError(f"rollout.temperature must be finite; got {rollout.temperature}")
    if optim.minibatches > rollout.prompts * rollout.samples:
        most = rollout.prompts * rollout.samples
        raise ValueError(
            f"optim.minibatches must be at most rollout.prompts × samples, {most}; got {optim.minibatches}"
        )
    if rollout.overlong and rollout.overlong_tokens > rollout.max_new_tokens:
        most = rollout.max_new_tokens
        raise ValueError(
            f"rollout.overlong_tokens must be at most max_new_tokens, {most}; got {rollout.overlong_tokens}"
        )
    if optim.name == "schedule-free" and optim.schedule not in ("auto", "constant"):
        raise ValueError(
            f"optim.schedule must be constant with schedule-free, which averages instead; got {optim.schedule}"
        )
    if optim.name == "schedule-free" and optim.betas[0] == 0:
        raise ValueError("optim.betas must start above 0 with schedule-free: it is the weight of the average")
    for name, text in {"model": config.model, "output": config.output, "task.name": config.task.name}.items():
        if not text.strip():
            raise ValueError(f"{name} must not be empty")
