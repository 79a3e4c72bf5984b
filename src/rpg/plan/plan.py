"""``rpg train --dry-run``: what a run would be. No weights are loaded, nothing is written, no GPU is needed."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..costs import devices, memory
from ..costs.devices import Device
from ..costs.memory import Layout
from ..costs.operations import Operations
from ..costs.seconds import StepSizes, Work, offload_seconds, rollout_seconds, train_seconds
from ..kernels.decode import WITH_8_BITS
from ..loss.methods import Method
from ..models.adapters import adapted
from ..models.adapters import weights as adapter_weights
from ..models.meta import Shell, shell
from ..models.vocabulary import local_vocabulary
from ..rollout.vllm import GPU_SHARE
from ..run.auto import choices, objections, settled
from ..run.config import Config
from ..run.folder import AUTO, holds_run, next_folder
from ..run.teacher import check_rows, check_tokens, teacher_of
from ..training.old_logp import OldLogp
from ..training.setup import (
    about_sampler,
    algorithm_of,
    anchored,
    check_ahead,
    check_rewards,
    method_of,
    pick_device,
    pick_dtype,
    rewards_of,
    warnings_about,
)
from .data import Data, data_of

SHARES = (0.25, 0.5, 1.0)  # of max_new_tokens: mean length of a response; the middle one is the estimate
KEPT = (1.0, 0.5, 0.25)  # of the groups, by dynamic sampling
IF_IT_FITTED = 64  # slots that time is estimated with where the run does not fit
MOST_MORE = 4.0  # prompts sampled for one that is wanted


@dataclass(frozen=True)
class Seconds:
    """Of one step, its parts; and of one evaluation."""

    rollout: float
    logp: float
    train: float
    evaluation: float
    offload: float = 0.0  # to host memory and back

    @property
    def step(self) -> float:
        return self.rollout + self.logp + self.train + self.offload


@dataclass(frozen=True)
class Case:
    """What is assumed of the responses, and what follows."""

    length: float  # mean, tokens
    sampled: float  # prompts for each that is trained on
    seconds: Seconds
    steps: int  # of the run: fewer than the settings say where minutes or tokens end it before
    run: float  # seconds, evaluations included


@dataclass(frozen=True)
class Disk:
    folder: str
    holds_run: bool
    checkpoint: int  # bytes
    kept: int  # at most
    free: int | None  # None: on another machine, of which nothing is known

    @property
    def needed(self) -> int:
        return self.checkpoint * self.kept


@dataclass(frozen=True)
class Plan:
    config: Config
    method: Method
    formula: str
    auto: dict[str, str]  # by the path of a setting that was auto: why it is what it is
    objections: tuple[str, ...]  # what would spoil the model, or the run
    warnings: tuple[str, ...]
    parameters: int
    trained: int
    packed: int  # held in 4 bits
    known_from: str  # where the model's shape is from
    device: Device
    dtype: str
    memory: memory.Memory
    available: int
    micro_tokens: int
    recompute: bool
    layout: Layout
    otherwise: Layout  # with optim.offload the other way
    optimiser_steps: int  # over a batch
    prompt_tokens: int  # assumed
    low: Case
    middle: Case
    high: Case
    evaluations: int
    data: Data
    disk: Disk

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.available

    @property
    def fits_disk(self) -> bool:
        return self.disk.free is None or self.disk.needed <= self.disk.free

    @property
    def limited(self) -> bool:
        """Whether its minutes or tokens end the run before its steps do."""
        return any(case.steps < self.config.steps for case in (self.low, self.middle, self.high))

    @property
    def tokens(self) -> int:
        """Response tokens of a step, at most."""
        rollout = self.config.rollout
        return rollout.prompts * rollout.samples * rollout.max_new_tokens


def plan(
    config: Config,
    device: str | None = None,
    shares: tuple[float, float, float] = SHARES,
    prompt_tokens: int | None = None,
) -> Plan:
    """``device``: a name of devices.py; None: the one that the run would have. Of a GPU that is named, the disk is
    not this machine's. ``shares`` and ``prompt_tokens`` are what is assumed of lengths. A mistake in the settings is a
    ValueError of one line."""
    auto = {path: why for path, (_, why) in choices(config).items()}
    config = settled(config)
    method = method_of(config)
    check_rewards(config)
    check_ahead(config, method, ranks=1)
    chosen, dtype = _device(config, device)
    peft = config.peft
    model = shell(config.model, dtype, config.model_options, peft.method, json.dumps(peft.options), peft.base_bits)
    rollout, held = config.rollout, method.anchor != "old"
    if getattr(model.model.config.get_text_config(), "num_attention_heads", None) is None:
        raise ValueError(f"{config.model} has no attention heads: neither a plan nor the engine knows such a model")
    host = None if device is not None else devices.host_memory()
    needed, sizes = _sizes(model.model, anchored(config, method), chosen, held, host)
    available = int(memory.SHARE * chosen.memory)
    shape = memory.Shape.of(model.model.config.get_text_config())
    operations = Operations.of(model.model, dtype.itemsize)
    work = Work(
        operations=replace(operations, cache=shape.cache_bytes(dtype.itemsize, rollout.cache_dtype)),
        activation=shape.moved_bytes(dtype.itemsize),
        trained=model.trained,
        frozen=adapted(model.model),
        recompute=sizes.recompute,
        micro_tokens=sizes.tokens,
        slots=sizes.layout.slots if needed.peak <= available else max(sizes.layout.slots, IF_IT_FITTED),
        cache_tokens=sizes.layout.cache_tokens if needed.peak <= available else None,
    )
    data = data_of(config)
    passes = [work] * (OldLogp(config, method.loss, dtype).always + method.advantage.needs_score_sq)
    warnings = [*warnings_about(method, config), *about_sampler(method, config), *method.remarks(rewards_of(config))]
    if held:
        taught = config.reference.model is not None
        passes.append(_of_teacher(work, config, dtype) if taught else work)
        warnings += _unchecked_tokens(config, model, dtype) if taught else ()
    prompt = prompt_tokens or data.prompt
    against = [objection.text for objection in objections(config)]
    if config.insist:
        warnings, against = [*against, *warnings], []
    if rollout.cache_dtype != "auto" and not chosen.eight_bits:
        against.append(f"rollout.cache_dtype {rollout.cache_dtype} needs {WITH_8_BITS}")
    context = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(context, int) and prompt + rollout.max_new_tokens > context:
        certain = prompt_tokens is not None or not data.guessed or rollout.max_new_tokens >= context
        (against if certain else warnings).append(_too_long(context, prompt, rollout.max_new_tokens))
    cases = []
    for share, kept in zip(shares, KEPT, strict=True):
        more = min(MOST_MORE, rollout.oversample / kept) if method.dynamic else 1.0
        seconds = _seconds(work, chosen, config, prompt, share, more, passes, data.evaluated, needed)
        steps = _steps(config, seconds.step, _tokens(config, share, more))
        run = steps * seconds.step + evaluations(config, steps) * seconds.evaluation
        cases.append(Case(max(1.0, share * rollout.max_new_tokens), more, seconds, steps, run))
    return Plan(
        config=config,
        method=method,
        formula=_formula(config, method),
        auto=auto,
        objections=tuple(against),
        warnings=tuple(warnings),
        parameters=model.parameters,
        trained=model.trained,
        packed=operations.packed,
        known_from=model.known_from,
        device=chosen,
        dtype=str(dtype).removeprefix("torch."),
        memory=needed,
        available=available,
        micro_tokens=sizes.tokens,
        recompute=sizes.recompute,
        layout=sizes.layout,
        otherwise=sizes.otherwise,
        optimiser_steps=config.optim.minibatches * config.optim.epochs,
        prompt_tokens=prompt,
        low=cases[0],
        middle=cases[1],
        high=cases[2],
        evaluations=evaluations(config, cases[1].steps),
        data=data,
        disk=_disk(config, model, needed, here=device is None or chosen.cpu),
    )


def _formula(config: Config, method: Method) -> str:
    chosen = algorithm_of(config)
    same = (chosen.dynamic_sampling, chosen.overlong_penalty) == (bool(method.dynamic), bool(method.overlong))
    return chosen.formula if same else f"as published: {chosen.formula}"


def _too_long(context: int, prompt: int, new: int) -> str:
    return (
        f"rollout.max_new_tokens {new:,} and prompts of some {prompt} tokens do not fit into the {context:,} of "
        f"the model: give at most {max(1, context - prompt):,}, or auto"
    )


def _device(config: Config, name: str | None) -> tuple[Device, torch.dtype]:
    if name is None:
        here = pick_device(config.device)
        return devices.at_hand(here), pick_dtype(config.dtype, here)
    chosen = devices.named(name)
    auto = torch.float32 if chosen.cpu else torch.bfloat16
    return chosen, auto if config.dtype == "auto" else pick_dtype(config.dtype, torch.device("cpu"))


@dataclass(frozen=True)
class _Sizes:
    tokens: int
    recompute: bool
    layout: Layout
    otherwise: Layout


def _sizes(model: Any, config: Config, device: Device, held: bool, host: int | None) -> tuple[memory.Memory, _Sizes]:
    """As pick_layout and make_oom_retry choose them, on a device that need not be there."""
    available = None if device.cpu else int(memory.SHARE * device.memory)
    logits = not _linear_head(model)
    layout = memory.lay_out(model, config, available, held, host=host)
    otherwise = layout
    if config.rollout.engine == "native":
        other = replace(config, optim=replace(config.optim, offload=not layout.offload))
        otherwise = memory.lay_out(model, other, available, held)
    tokens, recompute = memory.choose(model, config, layout, available, held, logits)
    needed = memory.estimate(model, config, layout, tokens, recompute, held, logits, gpu=not device.cpu)
    if config.rollout.engine == "vllm":  # its own weights and cache
        share = config.rollout.vllm.get("gpu_memory_utilization", 0.0 if device.cpu else GPU_SHARE)
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"rollout.vllm.gpu_memory_utilization must be between 0 and 1; got {share!r}")
        needed = replace(needed, cache=max(needed.cache + needed.weights, int(share * device.memory)))
    return needed, _Sizes(tokens, recompute, layout, otherwise)


def _linear_head(model: Any) -> bool:
    """As far as it can be seen without weights: see policy.head_is_linear."""
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return getattr(model.get_output_embeddings(), "bias", None) is None and cap is None


def _of_teacher(work: Work, config: Config, dtype: torch.dtype) -> Work:
    model = memory.teacher_shell(config, dtype).model
    shape = memory.Shape.of(model.config.get_text_config())
    activation = shape.moved_bytes(dtype.itemsize)
    return replace(work, operations=Operations.of(model, dtype.itemsize), activation=activation)


def _unchecked_tokens(config: Config, model: Shell, dtype: torch.dtype) -> Iterator[str]:
    """A teacher that cannot score the model's tokens is refused, as far as the files are here."""
    assert config.reference.model is not None
    check_rows(config, model.model, memory.teacher_shell(config, dtype).model)
    wanted = local_vocabulary(config.model, config.model_options)
    known = local_vocabulary(teacher_of(config.reference.model), {})
    if wanted is not None and known is not None:
        check_tokens(config, wanted, known)
        return
    absent = config.model if wanted is None else config.reference.model
    yield f"whether reference.model has the model's vocabulary was not checked: the tokenizer of {absent} is not here"


def _steps(config: Config, seconds: float, tokens: float) -> int:
    """As many as its budgets have room for."""
    by_time = math.inf if config.minutes is None else math.ceil(60 * config.minutes / seconds)
    by_tokens = math.inf if config.tokens is None else math.ceil(config.tokens / tokens)
    return int(min(config.steps, by_time, by_tokens))


def _tokens(config: Config, share: float, more: float) -> float:
    """That a step samples."""
    rollout = config.rollout
    groups = more * max(1.0, rollout.prompts / config.offpolicy.reuse)
    return groups * rollout.samples * max(1.0, share * rollout.max_new_tokens)


def evaluations(config: Config, steps: int) -> int:
    """The first, the last and those between."""
    every = config.eval.every
    return 2 + ((steps - 1) // every if every else 0) if steps else 1


def _seconds(
    work: Work,
    device: Device,
    config: Config,
    prompt: int,
    share: float,
    more: float,
    passes: Sequence[Work],
    problems: int,
    needed: memory.Memory,
) -> Seconds:
    """``passes``: without gradients, over all responses."""
    rollout = config.rollout
    mean = max(1.0, share * rollout.max_new_tokens)
    new = max(1.0, rollout.prompts / config.offpolicy.reuse)  # groups that a step samples: the others serve again
    trained = StepSizes(rollout.prompts, rollout.samples, prompt, mean, rollout.max_new_tokens)
    tested = StepSizes(problems, config.eval.k, prompt, mean, rollout.max_new_tokens)
    epochs = config.optim.epochs
    return Seconds(
        rollout=rollout_seconds(work, device, replace(trained, groups=more * new)),
        logp=sum(train_seconds(each, device, trained, forward=True) for each in passes),
        train=epochs * train_seconds(work, device, trained, config.optim.minibatches),
        evaluation=rollout_seconds(work, device, tested),
        offload=offload_seconds(work, device, needed.moved) if needed.offload else 0.0,
    )


def _disk(config: Config, model: Shell, needed: memory.Memory, here: bool) -> Disk:
    folder = next_folder(config.algorithm) if config.output == AUTO else Path(config.output)
    keep = config.checkpoint
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or (here and not os.access(there, os.W_OK)):
        raise ValueError(f"output: cannot write into {there}; give another folder with --output")
    weights = sum(x.nbytes for x in adapter_weights(model.model).values()) if adapted(model.model) else needed.weights
    return Disk(
        folder=str(folder),
        holds_run=here and holds_run(folder) is not None,
        checkpoint=weights + needed.masters + needed.moments + (config.reference.model is None) * needed.reference,
        kept=keep.keep + keep.best + 1 if keep.keep else 0,  # a new one is whole before an old one goes
        free=shutil.disk_usage(there).free if here else None,
    )
