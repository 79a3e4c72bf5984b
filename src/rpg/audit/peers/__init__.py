"""The losses of other libraries, run as installed, reduced to one number per token.

An audit of somebody else's loss is worth something only if that loss itself ran. So nothing here restates a formula:
each adapter calls the peer's own function on an enumerated batch, differentiates it with autograd, and multiplies by
the one global denominator that the peer divided by (all tokens, all sequences, or a constant). What is left is the
coefficient c = d loss / d log pi of each token, with any per-response 1/|y| still in it.

The plain name of a row ("trl grpo") is the peer's default way of adding a KL term; brackets name what departs from it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...console import install
from ..measure import Subject
from ..problem import EnumeratedBatch
from . import verl_worker
from .verl_worker import WIDE

_LENGTH = "1/|y| remains"

# Under truncated sampling. TRL (GRPOTrainer._generate_and_score_completions) and verl (RayPPOTrainer.fit) compute the
# old log-probabilities with the model in training, over the whole vocabulary. verl's bypass_mode and its asynchronous
# trainer take the engine's, which vLLM normalises over the kept tokens (logprobs_mode=processed_logprobs in both).
FEEDS = ("recomputed", "engine")

RunLoss = Callable[[bool, EnumeratedBatch, float], Tensor]  # (clip, batch, beta) -> c_NT
Ask = Callable[[dict[str, Any]], dict[str, Any]]


def peers(verl_python: str | None = None) -> tuple[list[Subject], list[str]]:
    """Every row that can be run from here, and one line for each library that cannot.

    verl cannot be installed beside current TRL. If this interpreter does not have it, the interpreter `verl_python`
    (or, failing that, the one named by the environment variable RPG_VERL_PYTHON) runs it as a child process.
    """
    rows: list[Subject] = []
    messages: list[str] = []
    verl_rows = functools.partial(_verl_rows, verl_python or os.environ.get("RPG_VERL_PYTHON"))
    for package, find in (("trl", _trl_rows), ("liger-kernel", _liger_rows), ("verl", verl_rows)):
        try:
            rows.extend(find())
        except _Unavailable as error:
            messages.append(str(error))
        except Exception as error:  # a peer that does not start is a line for the user, not a reason to stop
            reason = (str(error).splitlines() or [""])[-1]
            messages.append(f"{package} cannot be used: {type(error).__name__}: {reason}")
    return rows, messages


class _Unavailable(Exception):
    """A peer is not installed; the text is for the user."""


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        raise _Unavailable(f"{package} is not installed: {install('rpg-rl[audit]')}") from None


def _subject(
    source: str, name: str, kl: bool, notes: tuple[str, ...], dtype: torch.dtype, run: RunLoss, clips: bool
) -> Subject:
    divergence = "rkl" if kl else "none"
    return Subject(
        name=name,
        source=source,
        divergence=divergence,
        objective=_objective(name, divergence),
        note="; ".join(note for note in notes if note),
        dtype=dtype,
        coefficients=functools.partial(run, False),
        clipped=functools.partial(run, True) if clips else None,
        feeds=FEEDS,
    )


def _objective(name: str, divergence: str) -> str:
    """The objective that the peer's importance weights are exact for, where they are exact at all."""
    if "gspo" in name or "geo_mean" in name:
        return "geometric" if divergence == "none" else "geometric, token KL"
    whole = "rloo" in name or ("vespo" in name and divergence == "none")  # its KL is per token
    return "sequence" if whole else "token"


# --- settings that TRL and Liger share ---------------------------------------------------------------------------


class _Loss(NamedTuple):
    """A loss of the GRPO family, as TRL names its settings; Liger follows the same names."""

    name: str
    loss_type: str
    level: str = "token"
    clips: bool = True  # False: a smooth weight that cannot be switched off takes the place of the clip
    note: str = ""


def _denominator(loss: _Loss, batch: EnumeratedBatch, max_completion_length: int) -> int:
    """The global denominator that this loss type divides by."""
    if loss.loss_type in ("grpo", "sapo"):
        return len(batch.mask_NT)
    if loss.loss_type == "dr_grpo":
        return len(batch.mask_NT) * max_completion_length
    return int(batch.mask_NT.sum())


_LOSSES = (
    _Loss("grpo", "grpo", note=_LENGTH),
    _Loss("dapo", "dapo"),
    _Loss("dr_grpo", "dr_grpo"),
    _Loss("bnpo", "bnpo"),
    _Loss("cispo", "cispo", note="the clip bounds the ratio itself: epsilon_high, not 1 + epsilon_high"),
    _Loss("sapo", "sapo", clips=False, note=f"soft gate, always on; {_LENGTH}"),
    _Loss("gspo", "grpo", "sequence", note=f"importance_sampling_level=sequence; {_LENGTH}"),
    _Loss("vespo", "vespo", clips=False, note="soft sequence weight, always on"),
)
_BOTH_KL = ("grpo", "dapo", "gspo")  # where the KL term is shown both with and without the importance weight


def _variants(default: bool) -> Iterator[tuple[_Loss, str, bool | None, str]]:
    """(loss, suffix of the row's name, use_bias_correction_kl or None for no KL term, that setting in words)."""
    other = "no KL correction" if default else "KL correction"
    for loss in _LOSSES:
        yield loss, "", default, f"use_bias_correction_kl={default} (default)"
        if loss.name in _BOTH_KL:
            yield loss, f" ({other})", not default, f"use_bias_correction_kl={not default}"
        yield loss, " (no KL)", None, "beta=0"


# --- TRL ---------------------------------------------------------------------------------------------------------


def _trl_rows() -> list[Subject]:
    source = _installed("trl")
    from trl import GRPOConfig, RLOOConfig

    rows = []
    for loss, suffix, correction, kl_note in _variants(_field_defaults(GRPOConfig).use_bias_correction_kl):
        run = functools.partial(_trl_grpo, loss, correction)
        name, notes = f"trl {loss.name}{suffix}", (kl_note, loss.note)
        rows.append(_subject(source, name, correction is not None, notes, torch.float64, run, loss.clips))
    # RLOOTrainer subtracts its KL from the reward, in the middle of the method that also generates and scores, and so
    # out of reach of a batch made elsewhere: only its policy loss is audited.
    beta = _field_defaults(RLOOConfig).beta
    notes = ("ratio of whole sequences", f"its KL (beta={beta} by default) is in the reward, not run here")
    rows.append(_subject(source, "trl rloo (no KL)", False, notes, torch.float64, _trl_rloo, True))
    return rows


def _field_defaults(config_class: type[Any]) -> SimpleNamespace:
    """A configuration's published defaults, without running its checks of the machine."""
    defaults = {}
    for field in dataclasses.fields(config_class):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return SimpleNamespace(**defaults)


def _trl_trainer(trainer_class: type[Any], args: SimpleNamespace, clip: bool, logp_NT: Tensor) -> Any:
    """A trainer that was never constructed (no model, no data), with the state that its `_compute_loss` reads: one
    process, one accumulation step, and log-probabilities that are our leaf instead of a forward pass."""
    trainer: Any = object.__new__(trainer_class)
    args.steps_per_generation = 1
    if not clip:
        args.epsilon = args.epsilon_high = WIDE
    vars(trainer).update(vars(args))  # the constructor copies most settings under the same names; the rest follow
    trainer.args = args
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.current_gradient_accumulation_steps = 1
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list)}
    trainer.accelerator = SimpleNamespace(
        num_processes=1, gather=lambda values: values, reduce=lambda values, reduction: values
    )
    outputs = (logp_NT, torch.zeros_like(logp_NT), None)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: outputs
    return trainer


def _trl_inputs(batch: EnumeratedBatch) -> dict[str, Tensor]:
    prompt_N1 = torch.zeros(len(batch.tokens_NT), 1, dtype=torch.long)
    return {
        "prompt_ids": prompt_N1,
        "prompt_mask": torch.ones_like(prompt_N1),
        "completion_ids": batch.tokens_NT,
        "completion_mask": batch.mask_NT.long(),
        "advantages": batch.advantages_N,
        "num_items_in_batch": batch.mask_NT.sum(),
    }


def _trl_grpo(loss: _Loss, correction: bool | None, clip: bool, batch: EnumeratedBatch, beta: float) -> Tensor:
    from trl import GRPOConfig, GRPOTrainer

    logp_NT = batch.logp_NT.clone().requires_grad_()
    args = _field_defaults(GRPOConfig)
    args.loss_type, args.importance_sampling_level = loss.loss_type, loss.level
    args.beta, args.use_bias_correction_kl = (0.0, False) if correction is None else (beta, correction)
    trainer = _trl_trainer(GRPOTrainer, args, clip, logp_NT)
    inputs = _trl_inputs(batch)
    inputs["old_per_token_logps"] = batch.old_logp_NT
    inputs["ref_per_token_logps"] = batch.ref_logp_NT
    (grad_NT,) = torch.autograd.grad(trainer._compute_loss(None, inputs), logp_NT)
    return grad_NT * _denominator(loss, batch, args.max_completion_length)


def _trl_rloo(clip: bool, batch: EnumeratedBatch, beta: float) -> Tensor:
    from trl import RLOOConfig, RLOOTrainer

    logp_NT = batch.logp_NT.clone().requires_grad_()
    trainer = _trl_trainer(RLOOTrainer, _field_defaults(RLOOConfig), clip, logp_NT)
    inputs = _trl_inputs(batch) | {"old_logps": (batch.old_logp_NT * batch.mask_NT).sum(1)}  # as where it generates
    (grad_NT,) = torch.autograd.grad(trainer._compute_loss(None, inputs), logp_NT)
    return grad_NT * len(batch.mask_NT)


# --- Liger -------------------------------------------------------------------------------------------------------


def _liger_rows() -> list[Subject]:
    """The chunked loss. Liger's Triton kernel of the same loss needs a GPU and is left out."""
    source = _installed("liger-kernel")
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    rows = []
    for loss, suffix, correction, kl_note in _variants(LigerFusedLinearGRPOLoss().use_bias_correction_kl):
        run = functools.partial(_liger_grpo, loss, correction)
        kl = correction is not None
        notes = (kl_note, loss.note, "computes in float32")
        rows.append(_subject(source, f"liger {loss.name}{suffix}", kl, notes, torch.float32, run, loss.clips))
    return rows


def _liger_grpo(loss: _Loss, correction: bool | None, clip: bool, batch: EnumeratedBatch, beta: float) -> Tensor:
    """Liger takes hidden states and an output head, not log-probabilities: the head is the identity, so the hidden
    states are the logits, and the gradient on them is c (e_a - pi), from which c is projected out.

    Where pi puts all of its mass on the token, c acts on nothing and cannot be seen; it reads 0.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    num_steps, vocab_size = batch.logits_NTV.shape[1:]
    options: dict[str, Any] = {} if clip else {"epsilon_low": WIDE, "epsilon_high": WIDE}
    function = LigerFusedLinearGRPOLoss(
        beta=0.0 if correction is None else beta,
        use_bias_correction_kl=bool(correction),
        loss_type=loss.loss_type,
        importance_sampling_level=loss.level,
        max_completion_length=num_steps,
        chunk_size=len(batch.tokens_NT),  # responses at once: how it is computed, not what
        compiled=False,
        **options,
    )
    hidden_NTV = batch.logits_NTV.float().requires_grad_()
    value, _ = function(
        hidden_NTV,
        torch.eye(vocab_size),
        batch.tokens_NT,
        batch.mask_NT.float(),
        batch.advantages_N.float(),
        ref_per_token_logps=batch.ref_logp_NT.float(),
        old_per_token_logps=batch.old_logp_NT.float(),
    )
    (grad_NTV,) = torch.autograd.grad(value, hidden_NTV)
    score_NTV = torch.nn.functional.one_hot(batch.tokens_NT, vocab_size) - hidden_NTV.detach().double().softmax(-1)
    norm_NT = score_NTV.square().sum(-1)
    c_NT = (grad_NTV * score_NTV).sum(-1) / norm_NT * _denominator(loss, batch, num_steps)
    return torch.where(norm_NT > 1e-12, c_NT, 0.0)


# --- verl --------------------------------------------------------------------------------------------------------

_SEQUENCE_MEAN = "seq-mean-token-mean"
_KL_NOTES = {
    "low_var_kl": "k3, no gradient where k3 > 10",
    "kl": "k1",
    "abs": "|k1|",
    "mse": "k2",
    "k1+": "value of k1, gradient of k2",
    "k3+": "value of k3, gradient of k2",
}


class _VerlLoss(NamedTuple):
    name: str
    loss_mode: str
    note: str = ""
    loss_agg_mode: str | None = None  # None: verl's default
    clips: bool = True


# geo_mean and sapo average over sequences whatever loss_agg_mode says; only the KL term follows it. It is set to the
# sequence mean here, so that one denominator serves both terms.
_VERL_LOSSES = (
    _VerlLoss("vanilla", "vanilla", "dual clip"),
    _VerlLoss("vanilla, sequence mean", "vanilla", f"dual clip; {_LENGTH}", _SEQUENCE_MEAN),
    _VerlLoss("gspo", "gspo", "no 1/|y| in it"),
    _VerlLoss("gspo, sequence mean", "gspo", _LENGTH, _SEQUENCE_MEAN),
    _VerlLoss("cispo", "cispo", "clips below as well as above"),
    _VerlLoss("gpg", "gpg", "no importance weight", clips=False),
    _VerlLoss("geo_mean", "geo_mean", f"clips the log-ratio; {_LENGTH}", _SEQUENCE_MEAN),
    _VerlLoss("sapo", "sapo", f"soft gate, always on; {_LENGTH}", _SEQUENCE_MEAN, clips=False),
    _VerlLoss("dppo_tv", "dppo_tv", "masks by total variation, truncates the ratio"),
    _VerlLoss("dppo_kl", "dppo_kl", "masks by binary KL, truncates the ratio"),
)


def _verl_rows(python: str | None) -> list[Subject]:
    """verl's actor loss end to end, through `verl_worker`. Its other KL, use_kl_in_reward, is no part of the loss."""
    ask, hello = _verl_service(python)
    source, defaults = f"verl {hello['version']}", hello["defaults"]
    rows = []
    for loss in _VERL_LOSSES:
        kl_types = tuple(_KL_NOTES) if loss.name == "vanilla" else (defaults["kl_loss_type"],)
        mode = f"loss_agg_mode={loss.loss_agg_mode or defaults['loss_agg_mode'] + ' (default)'}"
        for kl_type in (*kl_types, None):
            run = functools.partial(_verl_coefficients, ask, loss, kl_type)
            notes = ("" if kl_type is None else _KL_NOTES.get(kl_type, kl_type), mode, loss.note)
            name = f"verl {loss.name} (no KL)" if kl_type is None else f"verl {loss.name} + {kl_type}"
            rows.append(_subject(source, name, kl_type is not None, notes, torch.float64, run, loss.clips))
    return rows


def _verl_coefficients(
    ask: Ask, loss: _VerlLoss, kl_type: str | None, clip: bool, batch: EnumeratedBatch, beta: float
) -> Tensor:
    request: dict[str, Any] = {"op": "coefficients", "loss_mode": loss.loss_mode, "loss_agg_mode": loss.loss_agg_mode}
    request |= {"kl_loss_type": kl_type, "beta": beta, "clip": clip}
    request |= {"advantages": batch.advantages_N.tolist(), "mask": batch.mask_NT.tolist()}
    for name in ("logp", "old_logp", "ref_logp"):
        request[name] = getattr(batch, f"{name}_NT").tolist()
    return torch.tensor(ask(request)["coefficients"], dtype=torch.float64)


def _verl_service(python: str | None) -> tuple[Ask, dict[str, Any]]:
    """Something that answers `verl_worker` requests, and its hello: this process if it has verl, else a child."""
    try:
        version("verl")
    except PackageNotFoundError:
        if python is None:
            where = "set RPG_VERL_PYTHON to the interpreter of an environment that has it"
            raise _Unavailable(f"verl is not installed, and cannot be beside trl >= 1: {where}") from None
        ask = _verl_child(python).ask
    else:
        ask = verl_worker.answer
    return ask, ask({"op": "hello"})


_verl_child = functools.cache(verl_worker.Client)  # importing verl takes some ten seconds, so one child serves all
