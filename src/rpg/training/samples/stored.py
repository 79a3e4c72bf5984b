"""Groups and responses under way, as a checkpoint holds them: numbers in tensors, the rest in JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...rollout import KeptIds, Rollout
from ...rollout.flight import Partial, Underway
from ...tasks import Task
from .collect import Group, Response

TYPES = {
    "prompts": torch.int32,
    "tokens": torch.int32,
    "logp": torch.float64,
    "versions": torch.int32,
    "kept_counts": torch.int32,
    "kept_ids": torch.int32,
}
Values = dict[str, Any]


class Writer:
    """Long lists go into a few flat tensors; what is written of each says how long it was."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.flat: dict[str, list[Any]] = {name: [] for name in TYPES}
        self.whole: dict[str, Tensor] = {}

    def put(self, name: str, values: Sequence[Any]) -> int:
        self.flat[name].extend(values)
        return len(values)

    def tensors(self) -> dict[str, Tensor]:
        flat = {name: torch.tensor(values, dtype=TYPES[name]) for name, values in self.flat.items() if values}
        return {f"{self.prefix}.{name}": x for name, x in (flat | self.whole).items()}


class Reader:
    def __init__(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        self.prefix, self.whole = prefix, tensors
        self.flat: dict[str, Iterator[Any]] = {
            name: iter(tensors[f"{prefix}.{name}"].tolist() if f"{prefix}.{name}" in tensors else ()) for name in TYPES
        }

    def get(self, name: str, size: int) -> list[Any]:
        return [next(self.flat[name]) for _ in range(size)]


# ---- groups ----------------------------------------------------------------------------------------------------------


def write_groups(prefix: str, groups: Iterable[Group]) -> tuple[list[Values], dict[str, Tensor]]:
    writer = Writer(prefix)
    values = [
        {
            "index": group.index,
            "number": group.number,
            "step": group.step,
            "uses": group.uses,
            "greedy": group.greedy,
            "prompt": writer.put("prompts", group.prompt_ids),
            "responses": [_response(writer, response) for response in group.responses],
        }
        for group in groups
    ]
    return values, writer.tensors()


def _response(writer: Writer, response: Response) -> Values:
    rollout = response.rollout
    values: Values = {
        "tokens": writer.put("tokens", rollout.tokens),
        "finished": rollout.finished,
        "score": response.score,
        "penalty": response.penalty,
        "solved": response.solved,
        "parts": response.parts,
        "text": response.text,
    }
    writer.put("logp", rollout.logp)
    if rollout.versions is not None:
        values["versions"] = writer.put("versions", rollout.versions)
    if rollout.kept is not None:
        writer.put("kept_counts", rollout.kept.counts.tolist())
        values["kept"] = writer.put("kept_ids", rollout.kept.ids.tolist())
    return values


def read_groups(prefix: str, values: Iterable[Values], tensors: Mapping[str, Tensor], task: Task) -> list[Group]:
    reader = Reader(prefix, tensors)
    return [
        Group(
            problem=task.train[group["index"]],
            prompt_ids=reader.get("prompts", group["prompt"]),
            responses=[_read_response(reader, response) for response in group["responses"]],
            greedy=group["greedy"],
            index=group["index"],
            number=group["number"],
            step=group["step"],
            uses=group["uses"],
        )
        for group in values
    ]


def _read_response(reader: Reader, values: Values) -> Response:
    size, kept = values["tokens"], None
    tokens, logp = reader.get("tokens", size), reader.get("logp", size)
    versions = reader.get("versions", size) if "versions" in values else None
    if "kept" in values:
        counts = np.array(reader.get("kept_counts", size), dtype=np.int32)
        kept = KeptIds(np.array(reader.get("kept_ids", values["kept"]), dtype=np.int32), counts)
    rollout = Rollout(tokens, logp, values["finished"], kept, versions)
    about = {name: values[name] for name in ("text", "score", "penalty", "solved", "parts")}
    return Response(rollout=rollout, **about)


# ---- responses under way ---------------------------------------------------------------------------------------------


def write_underway(prefix: str, groups: Iterable[Underway]) -> tuple[list[Values], dict[str, Tensor]]:
    writer, values = Writer(prefix), []
    for group in groups:
        caches = [group.cache, *(part.cache for part in group.parts)]
        for i, cache in enumerate(caches):
            # some are pieces of one copy, which the file has to have apart
            writer.whole |= {f"cache.{group.number}.{i}.{k}": _apart(x) for k, x in enumerate(cache)}
        parts = []
        for part in group.parts:
            writer.put("logp", part.logp)
            writer.put("versions", part.versions)
            parts.append({"tokens": writer.put("tokens", part.tokens), "ended": part.ended, "over": part.over})
        values.append(
            {
                "number": group.number,
                "prompt": writer.put("prompts", group.prompt),
                "seed": group.seed,
                "parts": parts,
                "caches": [len(cache) for cache in caches],
            }
        )
    return values, writer.tensors()


def _apart(x: Tensor) -> Tensor:
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def read_underway(prefix: str, values: Iterable[Values], tensors: Mapping[str, Tensor]) -> list[Underway]:
    reader, groups = Reader(prefix, tensors), []
    for group in values:
        caches = [
            [reader.whole[f"{prefix}.cache.{group['number']}.{i}.{k}"] for k in range(count)]
            for i, count in enumerate(group["caches"])
        ]
        prompt = reader.get("prompts", group["prompt"])
        parts = []
        for about, cache in zip(group["parts"], caches[1:], strict=True):
            size = about["tokens"]
            tokens, logp, versions = (reader.get(name, size) for name in ("tokens", "logp", "versions"))
            parts.append(Partial(tokens, logp, versions, about["ended"], about["over"], cache))
        groups.append(Underway(group["number"], prompt, group["seed"], parts, caches[0]))
    return groups
