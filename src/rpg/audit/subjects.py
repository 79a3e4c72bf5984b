"""What can be audited: a preset's name, an Algorithm, a PolicyLoss, or any callable, given or by import path."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..console import choose, describe, one_of
from ..loss import clip
from ..loss.methods import Algorithm, algorithm, algorithms
from ..loss.objective import DIVERGENCES
from ..loss.policy_loss import PolicyLoss
from .measure import Coefficients, Subject
from .problem import FEEDS, EnumeratedBatch

OBJECTIVE_OF_LEVEL = {"token": "token", "sequence": "sequence", "sequence-mean": "geometric"}
STATED = ("none", "fkl", "rkl", "ufkl", "urkl")  # the divergences that a loss can be held to


class LossFailed(ValueError):
    """A loss of the user's raised; the text is one line."""


def unclipped(loss: PolicyLoss) -> PolicyLoss:
    """The loss with its bounds out of the way. Without a ratio, or with a smooth weight, that is the loss itself."""
    gate = None if loss.gate is not None and loss.gate.role == "keep" else loss.gate
    loss = loss.replace(token_clip=None, gate=gate)
    if loss.through_advantage:  # stated by name: what it adds stands inside the clip, so the clip stays, without bounds
        return loss.replace(clip=clip.DualClip(None, None, None))
    if isinstance(loss.clip, clip.LogBox | clip.Truncate):
        return loss.replace(clip=type(loss.clip)(None, None))
    cuts = loss.clip is not None and loss.clip.action == "cut" and not isinstance(loss.clip, clip.Sigmoid)
    return loss.replace(clip=None, kl_in_clip=None) if cuts else loss


def of_policy_loss(loss: PolicyLoss, name: str, source: str = "rpg") -> Subject:
    def coefficients(loss: PolicyLoss) -> Coefficients:
        def compute(b: EnumeratedBatch, beta: float) -> Tensor:
            logp_NT = b.logp_NT.clone().requires_grad_()
            # the control variate has zero mean over independent batches, of which an enumeration is none
            sized = loss.replace(beta=beta if loss.divergence != "none" else 0.0, control_variate=False)
            rollout_NT = b.old_logp_NT if loss.mismatch is not None else None
            keep = torch.ones_like(b.mask_NT) if "keep" in loss.needs else None
            entropy = _entropy(b.logits_NTV) if loss.gate is not None and loss.gate.needs_entropy else None
            policies = (logp_NT, b.old_logp_NT, b.advantages_N, b.mask_NT, b.ref_logp_NT, rollout_NT)
            out = sized(*policies, keep=keep, entropy=entropy)
            (c_NT,) = torch.autograd.grad(out.loss.sum(), logp_NT)
            return c_NT * sized.count(b.mask_NT).double()

        return compute

    plain = unclipped(loss)
    row = DIVERGENCES.get(loss.divergence)
    return Subject(
        name=name,
        source=source,
        divergence="rkl" if row is not None and not row.exact else loss.divergence,
        objective="sequence" if loss.kl_to_go and loss.level == "sequence" else OBJECTIVE_OF_LEVEL[loss.level],
        coefficients=coefficients(plain),
        clipped=None if plain == loss else coefficients(loss),
        gated=loss.gate is not None,
    )


def _entropy(logits_NTV: Tensor) -> Tensor:
    logp_NTV = logits_NTV.log_softmax(-1)
    return -(logp_NTV.exp() * logp_NTV).sum(-1)


def of_callable(fn: Callable[..., Any], name: str, divergence: str, objective: str) -> Subject:
    """``fn(logp, old_logp, advantages, mask, ref_logp)`` -> a loss, an object with ``.loss``, or a tuple led by it.

    Arguments are passed by name if the function names them so, else by position; ``beta`` is passed if it takes one.
    """
    parameters = inspect.signature(fn).parameters
    names = ("logp", "old_logp", "advantages", "mask", "ref_logp")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    by_name = takes_any or all(name in parameters for name in names[:4])
    taken = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY and p.name != "beta"]
    misplaced = any(each in names and names.index(each) != at for at, each in enumerate(taken[: len(names)]))
    takes_all = len(taken) >= 4 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if not by_name and (misplaced or not takes_all):
        taking = f"({', '.join(parameters)})"
        raise ValueError(f"{name} takes {taking}, but a loss is called with ({', '.join(names)}) or the first four")

    def compute(b: EnumeratedBatch, beta: float) -> Tensor:
        logp_NT = b.logp_NT.clone().requires_grad_()
        values = dict(zip(names, (logp_NT, b.old_logp_NT, b.advantages_N, b.mask_NT, b.ref_logp_NT), strict=True))
        extra = {"beta": beta} if "beta" in parameters else {}
        if by_name:
            given = {k: v for k, v in values.items() if k in parameters or takes_any}
        else:
            given = dict(list(values.items())[: len(parameters) - len(extra)])
        try:
            out = fn(**given, **extra) if by_name else fn(*given.values(), **extra)
        except Exception as error:
            shapes = [f"{k} {[*v.shape]}" for k, v in given.items()] + [f"{k} {v:g}" for k, v in extra.items()]
            raise LossFailed(f"{name} raised {describe(error)} (called with {', '.join(shapes)})") from error
        loss = out[0] if isinstance(out, tuple) else getattr(out, "loss", out)
        if not isinstance(loss, Tensor):
            raise TypeError(f"{name} must return a loss that depends on logp; got {type(loss).__name__}")
        if loss.grad_fn is None:
            raise TypeError(f"{name} must return a loss that depends on logp; it has no gradient: is it detached?")
        (c_NT,) = torch.autograd.grad(loss.sum(), logp_NT, allow_unused=True)
        if c_NT is None:
            raise TypeError(f"{name} must return a loss that depends on logp; it has no gradient there")
        return c_NT if loss.isfinite().all() else torch.full_like(c_NT, torch.nan)

    return Subject(name, "user", divergence, objective, compute, feeds=tuple(FEEDS))


def share_without_reward(subject: Subject, batch: EnumeratedBatch, beta: float) -> float:
    """The share of tokens whose gradient stays the same when the rewards double: those that a clip cuts off."""
    c_NT = subject.coefficients(batch, beta)
    doubled_NT = subject.coefficients(batch.with_rewards_times(2.0), beta)
    return float((doubled_NT == c_NT)[batch.mask_NT].float().mean())


def load(path: str) -> Any:
    """The object at ``package.module:name`` or ``file.py:name``."""
    module_name, _, attribute = path.rpartition(":")
    try:
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            if spec is None or spec.loader is None:
                raise ImportError(f"cannot read {module_name}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except (ImportError, OSError) as error:
        raise ValueError(f"cannot import {module_name!r}: {error}") from None
    if not hasattr(module, attribute):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ValueError(choose(f"name in {module_name}", attribute, names))
    return getattr(module, attribute)


def _functions(file: str) -> str:
    """How to name one of a file's functions, and which it has; nothing of it is run."""
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except OSError:
        return "and there is no such file"
    except (SyntaxError, ValueError) as error:
        return f"write {file}:NAME; it cannot be read: {describe(error)}"
    names = [f.name for f in body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")]
    return f"write {file}:NAME; it has " + (", ".join(names) or "no function")


def resolve(
    loss: str | PolicyLoss | Algorithm | Callable[..., Any],
    divergence: str | None = None,
    objective: str | None = None,
) -> Subject:
    """A subject from anything that can be audited; ``divergence`` and ``objective`` state what it should ascend."""
    if divergence is not None:
        one_of("divergence", divergence, STATED)
    if objective is not None:
        one_of("objective", objective, OBJECTIVE_OF_LEVEL.values())
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", getattr(loss, "name", "PolicyLoss"))
    target: Any = loss
    if isinstance(loss, str):
        if ":" in loss:
            target = load(loss)
        elif loss in algorithms():
            target = algorithm(loss)
        elif loss.endswith(".py"):
            raise ValueError(f"{loss} names no function; {_functions(loss)}")
        else:
            raise ValueError(choose("loss", loss, algorithms()) + "; or an import path, package.module:name")
    if isinstance(target, Algorithm):
        target = target.loss
    if isinstance(target, PolicyLoss):
        subject = of_policy_loss(target, name)
    elif callable(target):
        subject = of_callable(target, name, divergence or "rkl", objective or "token")
    else:
        raise TypeError(f"{name} is neither a loss nor a callable but {type(target).__name__}")
    return replace(subject, divergence=divergence or subject.divergence, objective=objective or subject.objective)
