"""Groups of responses -> tensors, and their division into minibatches and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..distributed.ranks import World
from ..loss.advantages import Advantage
from .collect import Group

CPU_MICRO_TOKENS = 1024  # activations stay in the cache
GPU_MICRO_TOKENS = 16384


@dataclass(frozen=True)
class Batch:
    """Responses of a step, [B, …]; sequences are prompt and response, padded on the right."""

    ids_BL: Tensor
    start_B: Tensor  # where the response begins
    mask_BT: Tensor  # true on response tokens
    old_logp_BT: Tensor
    reward_B: Tensor
    group_B: Tensor
    rollout_logp_BT: Tensor | None = None  # the sampler's own, where old_logp was computed anew
    ref_logp_BT: Tensor | None = None
    advantage: Tensor | None = None  # [B] or [B,T]

    def __len__(self) -> int:
        return len(self.ids_BL)

    @property
    def lengths_B(self) -> Tensor:
        """Of prompt and response together."""
        return self.start_B + self.mask_BT.sum(-1)

    def rows(self, index: Tensor) -> Batch:
        """Some rows, without the padding that they do not need."""
        length_B = self.mask_BT[index].sum(-1)
        whole, response = (
            torch.stack([self.start_B[index] + length_B, length_B]).amax(1).tolist()
        )  # the host waits once
        width = {"ids_BL": whole, "mask_BT": response, "old_logp_BT": response}
        width |= {"rollout_logp_BT": response, "ref_logp_BT": response, "advantage": response}

        def cut(name: str, value: Tensor | None) -> Tensor | None:
            return None if value is None else (value[:, : width[name]] if value.dim() == 2 else value)[index]

        return replace(self, **{f.name: cut(f.name, getattr(self, f.name)) for f in fields(self)})  # type: ignore[arg-type]


def make_batch(groups: Sequence[Group], pad: int, device: torch.device) -> Batch:
    found = [(g, group, response) for g, group in enumerate(groups) for response in group.responses]
    sequences = [[*group.prompt_ids, *response.rollout.tokens] for _, group, response in found]
    logps = [response.rollout.logp for _, _, response in found]
    ids_BL, _ = _padded(sequences, np.int64(pad))
    old_logp_BT, mask_BT = _padded(logps, np.float32(0))
    return Batch(
        ids_BL=ids_BL.to(device),
        start_B=torch.tensor([len(group.prompt_ids) for _, group, _ in found], device=device),
        mask_BT=mask_BT.to(device),
        old_logp_BT=old_logp_BT.to(device),
        reward_B=torch.tensor([response.reward for _, _, response in found], device=device),
        group_B=torch.tensor([g for g, _, _ in found], device=device),
    )


def _padded(rows: Sequence[Sequence[Any]], pad: Any) -> tuple[Tensor, Tensor]:
    """Rows padded on the right to one length, of the type of ``pad``, and where they are. (A tensor a row is slow.)"""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    out = np.full(mask.shape, pad)
    out[mask] = np.fromiter(chain.from_iterable(rows), out.dtype, count=int(lengths.sum()))
    return torch.from_numpy(out), torch.from_numpy(mask)


def with_advantages(batch: Batch, advantage: Advantage, greedy: Sequence[float] | None) -> Batch:
    greedy_B = None if greedy is None else torch.tensor(greedy, device=batch.reward_B.device)[batch.group_B]
    values = advantage(
        batch.reward_B,
        batch.group_B,
        mask=batch.mask_BT,
        old_logp=batch.old_logp_BT,
        ref_logp=batch.ref_logp_BT,
        greedy_rewards=greedy_B,
    )
    return replace(batch, advantage=values)


def micro_batches(batch: Batch, tokens: int | None, packs: bool = True) -> Iterator[Tensor]:
    """Indices of rows, in parts of at most ``tokens`` (or a single row).

    Where the policy packs, groups stay together and a group's prompt counts once in each part. Where it pads, rows of
    similar length are together, and each counts as much as the longest.
    """
    for part in _parts(_about(batch), _limit(batch, tokens), packs):
        yield torch.tensor(part, device=batch.ids_BL.device)


def dealt(batch: Batch, tokens: int | None, packs: bool, world: World) -> list[Tensor | None]:
    """The micro-batches of this rank; None where it has no more of them but another rank has: all make as many passes.

    Rows go to ranks in shares of about the same number of tokens. Groups stay together as far as that goes.
    """
    if world.size == 1:
        return list(micro_batches(batch, tokens, packs))
    about, limit = _about(batch), _limit(batch, tokens)
    shares = _shares(about, world.size)
    cuts = [[[share[i] for i in part] for part in _parts([about[i] for i in share], limit, packs)] for share in shares]
    mine: list[Tensor | None] = [torch.tensor(part, device=batch.ids_BL.device) for part in cuts[world.rank]]
    return mine + [None] * (max(map(len, cuts)) - len(mine))


def filler(batch: Batch) -> Batch:
    """A row for a rank that has nothing to compute, but has to take part: the shortest."""
    return batch.rows(batch.lengths_B.argmin()[None])


def _about(batch: Batch) -> list[list[int]]:
    """Of each row its group, and the lengths of prompt and response."""
    about: list[list[int]] = torch.stack([batch.group_B, batch.start_B, batch.mask_BT.sum(-1)], 1).tolist()
    return about


def _limit(batch: Batch, tokens: int | None) -> int:
    if tokens is not None:
        return tokens
    return CPU_MICRO_TOKENS if batch.ids_BL.device.type == "cpu" else GPU_MICRO_TOKENS


def _parts(about: list[list[int]], tokens: int, packs: bool) -> Iterator[list[int]]:
    return _packed_parts(about, tokens) if packs else _padded_parts(about, tokens)


def _shares(about: list[list[int]], size: int) -> list[list[int]]:
    """Rows, one group after the other, cut where a share is full."""
    order = sorted(range(len(about)), key=lambda i: about[i][0])
    total, before = sum(start + length for _, start, length in about), 0
    shares: list[list[int]] = [[] for _ in range(size)]
    for i in order:
        more = about[i][1] + about[i][2]
        shares[(2 * before + more) * size // (2 * total)].append(i)  # where the middle of the row falls
        before += more
    return shares


def _packed_parts(about: list[list[int]], tokens: int) -> Iterator[list[int]]:
    longest: dict[int, int] = {}
    for group, start, length in about:
        longest[group] = max(longest.get(group, 0), start + length)
    order = sorted(range(len(about)), key=lambda i: (longest[about[i][0]], about[i][0], about[i][2]))
    part: list[int] = []
    size, last = 0, None
    for i in order:
        group, start, length = about[i]
        alone = start + length - 1  # the last token predicts nothing
        more = alone - start if group == last else alone
        if part and size + more > tokens:
            yield part
            part, size, more = [], 0, alone
        part.append(i)
        size, last = size + more, group
    if part:
        yield part


def _padded_parts(about: list[list[int]], tokens: int) -> Iterator[list[int]]:
    part: list[int] = []
    for length, i in sorted((start + length - 1, i) for i, (_, start, length) in enumerate(about)):
        if part and (len(part) + 1) * length > tokens:
            yield part
            part = []
        part.append(i)
    if part:
        yield part
