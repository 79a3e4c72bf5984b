"""Groups of responses -> tensors, and their division into minibatches and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..distributed.ranks import World
from ..kernels.kept import Kept
from ..loss.advantages import Advantage
from ..rollout import KeptIds
from .samples.collect import Group


@dataclass(frozen=True)
class Batch:
    """Responses of a step, [B, …]; sequences are prompt and response, padded on the right."""

    ids_BL: Tensor
    start_B: Tensor  # where the response begins
    mask_BT: Tensor  # true on response tokens
    old_logp_BT: Tensor
    reward_B: Tensor
    group_B: Tensor
    rollout_logp_BT: Tensor | None = None  # the sampler's own, where old_logp was recomputed
    ref_logp_BT: Tensor | None = None
    advantage: Tensor | None = None  # [B] or [B,T]
    kept_count_BT: Tensor | None = None  # with truncated sampling: how many tokens could be drawn at each state,
    kept_ids_K: Tensor | None = None  # and which, a set after the other. On the host, as they may be many

    def __len__(self) -> int:
        return len(self.ids_BL)

    @property
    def lengths_B(self) -> Tensor:
        """Of prompt and response together."""
        return self.start_B + self.mask_BT.sum(-1)

    @cached_property
    def kept(self) -> Kept | None:
        """What each response token was drawn from, in the order of the rows; None: from the whole vocabulary."""
        if self.kept_count_BT is None or self.kept_ids_K is None:
            return None
        return Kept(self.kept_ids_K, self.kept_count_BT[self.kept_count_BT > 0].long())

    def kept_metrics(self) -> dict[str, float]:
        """Sizes of the kept sets, where sampling was truncated."""
        if self.kept is None:
            return {}
        return {"kept/mean": len(self.kept.ids_K) / self.kept.size, "kept/max": float(self.kept.count_N.max())}

    def advantage_of_responses(self) -> list[float]:
        """One a response: that of the first token, where each has its own."""
        assert self.advantage is not None
        values: list[float] = (self.advantage if self.advantage.dim() == 1 else self.advantage[:, 0]).tolist()
        return values

    @property
    def loss_inputs(self) -> dict[str, Any]:
        """What a PolicyLoss needs to know of the batch, beside the policy's own log-probabilities."""
        assert self.advantage is not None
        return {
            "old_logp": self.old_logp_BT,
            "advantages": self.advantage,
            "mask": self.mask_BT,
            "ref_logp": self.ref_logp_BT,
            "rollout_logp": self.rollout_logp_BT,
            "groups": self.group_B,
        }

    @property
    def as_recorded(self) -> dict[str, Tensor | None]:
        """By the names of recorded/layout.py."""
        return {
            "ids": self.ids_BL,
            "prompt_length": self.start_B,
            "mask": self.mask_BT,
            "old_logp": self.old_logp_BT,
            "rollout_logp": self.rollout_logp_BT,
            "ref_logp": self.ref_logp_BT,
            "reward": self.reward_B.float(),
            "group": self.group_B,
            "advantages": self.advantage,
            "kept_count": self.kept_count_BT,
            "kept_ids": self.kept_ids_K,
        }

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

        chosen = {f.name: cut(f.name, getattr(self, f.name)) for f in fields(self) if not f.name.startswith("kept_")}
        return replace(self, **chosen, **self._kept_rows(index, response))  # type: ignore[arg-type]

    def layout(self) -> tuple[Tensor, Tensor, int, Tensor]:
        """What Policy.pack asks for, on the host: so that nobody waits for the device when it is laid out."""
        return self.start_B.cpu(), self.mask_BT.cpu(), self.ids_BL.shape[1], self.group_B.cpu()

    def _kept_rows(self, index: Tensor, width: int) -> dict[str, Tensor]:
        """The kept sets of these rows."""
        if self.kept_count_BT is None or self.kept_ids_K is None:
            return {}
        size_B, index = self.kept_count_BT.sum(-1), index.cpu()
        ends, ids_K = [0, *size_B.cumsum(0).tolist()], self.kept_ids_K.numpy()
        some_K = np.concatenate([ids_K[ends[row] : ends[row + 1]] for row in index.tolist()])
        return {"kept_count_BT": self.kept_count_BT[index, :width], "kept_ids_K": torch.from_numpy(some_K)}


def make_batch(groups: Sequence[Group], pad: int, device: torch.device) -> Batch:
    rows = [(g, group, response) for g, group in enumerate(groups) for response in group.responses]
    sequences = [[*group.prompt_ids, *response.rollout.tokens] for _, group, response in rows]
    logps = [response.rollout.logp for _, _, response in rows]
    ids_BL, _ = _padded(sequences, np.int64(pad))
    old_logp_BT, mask_BT = _padded(logps, np.float32(0))
    count_BT, ids_K = _kept([response.rollout.kept for _, _, response in rows], mask_BT)
    return Batch(
        ids_BL=ids_BL.to(device),
        start_B=torch.tensor([len(group.prompt_ids) for _, group, _ in rows], device=device),
        mask_BT=mask_BT.to(device),
        old_logp_BT=old_logp_BT.to(device),
        reward_B=torch.tensor([response.reward for _, _, response in rows], device=device),
        group_B=torch.tensor([g for g, _, _ in rows], device=device),
        kept_count_BT=count_BT,
        kept_ids_K=ids_K,
    )


def _kept(sets: Sequence[KeptIds | None], mask_BT: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Counts [B,T] and ids; nothing where sampling was not truncated."""
    told = [kept for kept in sets if kept is not None]
    if not told:
        return None, None
    if len(told) < len(sets):
        raise ValueError(
            f"{len(sets) - len(told)} of {len(sets)} responses do not tell the tokens they were drawn from"
        )
    count_BT = torch.zeros(mask_BT.shape, dtype=torch.int32)
    count_BT[mask_BT] = torch.from_numpy(np.concatenate([kept.counts for kept in told]))
    return count_BT, torch.from_numpy(np.concatenate([kept.ids for kept in told]))


def _padded(rows: Sequence[Sequence[Any]], pad: Any) -> tuple[Tensor, Tensor]:
    """Rows padded on the right to one length, of the type of ``pad``, and where they are. (A tensor a row is slow.)"""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    out = np.full(mask.shape, pad)
    out[mask] = np.fromiter(chain.from_iterable(rows), out.dtype, count=int(lengths.sum()))
    return torch.from_numpy(out), torch.from_numpy(mask)


def with_advantages(
    batch: Batch, advantage: Advantage, greedy: Sequence[float] | None, score_sq_BT: Tensor | None = None
) -> Batch:
    greedy_B = None if greedy is None else torch.tensor(greedy, device=batch.reward_B.device)[batch.group_B]
    values = advantage(
        batch.reward_B,
        batch.group_B,
        mask=batch.mask_BT,
        old_logp=batch.old_logp_BT,
        ref_logp=batch.ref_logp_BT,
        greedy_rewards=greedy_B,
        score_sq=score_sq_BT,
    )
    return replace(batch, advantage=values)


def micro_batches(batch: Batch, tokens: int, packs: bool = True) -> list[Tensor]:
    """Indices of rows, in micro-batches of at most ``tokens`` (or a single row).

    Where the policy packs, groups stay together and a group's prompt counts once in each. Where it pads, rows of
    similar length are together, and each counts as much as the longest.
    """
    return [torch.tensor(rows, device=batch.ids_BL.device) for rows in _cut(_shapes(batch), tokens, packs)]


def rank_micro_batches(batch: Batch, tokens: int, packs: bool, world: World) -> list[tuple[Tensor | None, Batch]]:
    """This rank's micro-batches, each with the indices of its rows. All ranks make as many passes: where another has
    more, there are no indices, and the shortest row to take part with.

    Rows go to ranks in shares of about the same number of tokens. Groups stay together as far as that goes.
    """
    if world.size == 1:
        return [(index, batch.rows(index)) for index in micro_batches(batch, tokens, packs)]
    shapes = _shapes(batch)
    shares = _shares(shapes, world.size)
    cuts = [[[share[i] for i in rows] for rows in _cut([shapes[i] for i in share], tokens, packs)] for share in shares]
    mine: list[Tensor | None] = [torch.tensor(rows, device=batch.ids_BL.device) for rows in cuts[world.rank]]
    mine += [None] * (max(map(len, cuts)) - len(mine))
    shortest = batch.lengths_B.argmin()[None]
    return [(index, batch.rows(shortest if index is None else index)) for index in mine]


def _shapes(batch: Batch) -> list[list[int]]:
    """Of each row its group, and the lengths of prompt and response."""
    shapes: list[list[int]] = torch.stack([batch.group_B, batch.start_B, batch.mask_BT.sum(-1)], 1).tolist()
    return shapes


def _cut(shapes: list[list[int]], tokens: int, packs: bool) -> Iterator[list[int]]:
    return _cut_packed(shapes, tokens) if packs else _cut_padded(shapes, tokens)


def _shares(shapes: list[list[int]], size: int) -> list[list[int]]:
    """Rows, one group after the other, cut where a share is full."""
    order = sorted(range(len(shapes)), key=lambda i: shapes[i][0])
    total, before = sum(start + length for _, start, length in shapes), 0
    shares: list[list[int]] = [[] for _ in range(size)]
    for i in order:
        more = shapes[i][1] + shapes[i][2]
        shares[(2 * before + more) * size // (2 * total)].append(i)  # where the middle of the row falls
        before += more
    return shares


def _cut_packed(shapes: list[list[int]], tokens: int) -> Iterator[list[int]]:
    longest: dict[int, int] = {}
    for group, start, length in shapes:
        longest[group] = max(longest.get(group, 0), start + length)
    order = sorted(range(len(shapes)), key=lambda i: (longest[shapes[i][0]], shapes[i][0], shapes[i][2]))
    rows: list[int] = []
    size, last = 0, None
    for i in order:
        group, start, length = shapes[i]
        alone = start + length - 1  # the last token predicts nothing
        more = alone - start if group == last else alone
        if rows and size + more > tokens:
            yield rows
            rows, size, more = [], 0, alone
        rows.append(i)
        size, last = size + more, group
    if rows:
        yield rows


def _cut_padded(shapes: list[list[int]], tokens: int) -> Iterator[list[int]]:
    rows: list[int] = []
    for length, i in sorted((start + length - 1, i) for i, (_, start, length) in enumerate(shapes)):
        if rows and (len(rows) + 1) * length > tokens:
            yield rows
            rows = []
        rows.append(i)
    if rows:
        yield rows
