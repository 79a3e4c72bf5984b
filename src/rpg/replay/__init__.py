"""One recorded batch and one model: which gradient would each method take, and how noisy is it?

``replay(batch, policy)`` is all of it. One forward pass over the batch gives log π of every response token. From it
comes what each method multiplies ∇log π by (vectors.py). A second pass goes group by group, with one backward pass for
each of those (gradients.py). No tensor of [N,V] is made: the policy scores as in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..models.policy import Policy
from ..recorded.layout import Recorded, read
from ..run.folder import RECORDED
from ..training.batch import Batch
from .gradients import all_gradients, score
from .methods import Compared, betas, bounds, compared, exact
from .results import Family, Replayed, entries, far_away, worst_disagreement
from .vectors import BatchScores, Multiple, VectorPool, coefficients, measured

CLOSE = 1e-3  # a replay that is further than this from what the trainer measured is told


def replay(
    recorded: Recorded,
    policy: Policy,
    methods: Sequence[str] = (),
    *,
    tokens: int = 4096,
    path: str = "",
    progress: Callable[[str], None] = lambda text: None,
    host_bytes: int | None = None,
) -> Replayed:
    """``methods``: names or patterns; none: the usual dozen. ``tokens`` of a forward pass (a row at least)."""
    begin = time.perf_counter()
    policy.temperature = float(recorded.about["temperature"])
    chosen, left_out = compared(recorded, methods)
    batch = as_batch(recorded, policy.device)
    progress("log-probabilities")
    logp_BT, entropy_BT = score(policy, batch, tokens)
    mask_BT = recorded.mask_BT.to(policy.device)
    scores = BatchScores(
        logp_BT * mask_BT,
        entropy_BT * mask_BT,
        recorded.old_logp_BT.to(policy.device),
        mask_BT,
        recorded.group_B.to(policy.device),
    )
    pool, families = VectorPool(), []
    for one in chosen:
        try:
            families.append(_family(one, scores, pool))
        except (ValueError, TypeError) as error:
            left_out[one.name] = str(error)
    if not families:
        raise ValueError(f"no method can be replayed: {next(iter(left_out.values()))}")
    found = all_gradients(policy, batch, scores, pool, tokens, progress, host_bytes)
    rows, cosines = entries(families, found)
    out = Replayed(
        path=path,
        model=str(recorded.about.get("model", "")),
        about={name: value for name, value in recorded.about.items() if name not in ("measured", "method")},
        measured=recorded.measured,
        entries=rows,
        cosines=cosines,
        left_out=left_out,
        notes=[],
        groups=found.groups,
        responses=len(recorded),
        tokens=int(recorded.mask_BT.sum()),
        parameters=found.parameters,
        sketched=found.sketched,
        vectors=len(pool.vectors),
        forward_seconds=found.forward_seconds,
        backward_seconds=found.backward_seconds,
        seconds=time.perf_counter() - begin,
    )
    return replace(out, notes=_notes(out, recorded, scores))


def as_batch(recorded: Recorded, device: torch.device) -> Batch:
    """For the policy's score: all tokens of the responses, and rows with the same prompt share it."""
    width = recorded.old_logp_BT.shape[1]
    whole_BT = torch.arange(width) < recorded.response_length_B[:, None]
    prompts = [tuple(row[:n].tolist()) for row, n in zip(recorded.ids_BL, recorded.prompt_length_B, strict=True)]
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    return Batch(
        ids_BL=recorded.ids_BL.to(device),
        start_B=recorded.prompt_length_B.to(device),
        mask_BT=whole_BT.to(device),
        old_logp_BT=recorded.old_logp_BT.to(device),
        reward_B=recorded.reward_B.to(device),
        group_B=torch.tensor([numbers[prompt] for prompt in prompts], device=device),
        kept_count_BT=recorded.kept_count_BT,
        kept_ids_K=recorded.kept_ids_K,
    )


def _family(one: Compared, scores: BatchScores, pool: VectorPool) -> Family:
    base = coefficients(one, scores)

    def less(other: Compared) -> Multiple:
        return pool.add(_without_rounding(coefficients(other, scores) - base, base))

    loss, metrics = measured(one, scores)
    return Family(
        one,
        pool.add(base),
        pool.add(coefficients(exact(one), scores)),
        {factor: less(other) for factor, other in betas(one).items()},
        {factor: less(other) for factor, other in bounds(one).items()},
        loss,
        metrics,
    )


def _without_rounding(difference: Tensor, base: Tensor) -> Tensor:
    """Zero where the two differ by float64's rounding alone."""
    return difference.masked_fill(difference.abs() <= 1e-14 * base.abs(), 0)


def _notes(out: Replayed, recorded: Recorded, scores: BatchScores) -> list[str]:
    notes = []
    if (text := far_away(scores.logp_BT, scores.old_logp_BT, scores.mask_BT)) is not None:
        notes.append(text)
    if out.ran is not None and out.measured:
        name, apart = worst_disagreement(out.ran, out.measured)
        if apart > CLOSE:
            notes.append(f"{name} differs by {apart:.1%} from what the trainer measured: another model, dtype or loss?")
    if recorded.about.get("reward_of"):
        notes.append("the trainer gave no rewards: the advantages that ran stand for them")
    if recorded.ref_logp_BT is None:
        notes.append("no ref_logp in the file: every KL is anchored at old, the policy that sampled")
    if out.groups < 2:
        notes.append("one group alone: no variance over groups")
    if out.sketched:
        notes.append("cosines are of random sketches, right to about 0.001; norms and variances are exact")
    return notes


# ---- which file ------------------------------------------------------------------------------------------------------


def find(path: Path) -> Path:
    """A batch, or the newest that a run has recorded."""
    if not path.is_dir():
        return path
    found = sorted(path.glob(f"{RECORDED}/*.safetensors")) or sorted(path.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{path} has recorded no batch: train with --log.record STEP, then replay")
    return found[-1]


def model_of(recorded: Recorded, path: Path) -> str:
    """The model that the file names: a folder beside it, or what any command takes."""
    name = recorded.about.get("model")
    if not name:
        raise ValueError(f"{path} names no model: give --model FOLDER, the weights as they were before that step")
    beside = path.parent / str(name)
    return str(beside) if beside.is_dir() else str(name)


__all__ = ["Recorded", "Replayed", "find", "model_of", "read", "replay"]
