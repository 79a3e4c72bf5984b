"""How large everything is, and what runs where: one dataclass, a flag a field."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any


def size(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Sizes:
    """The defaults are those of a GPU."""

    model: str = size("0.5b", "a shape (17m, 0.5b, 1.5b, 4b, tiny: random weights), builtin, a folder or a hub id")
    small: str = size("17m", "the small model, whose limit is launches rather than memory")
    prompts: int = size(256, "rollout: prompts, one response each")
    slots: int = size(512, "rows decoded at once by the small model and in the whole step")
    prompt_tokens: int = size(178, "tokens of a prompt")
    new_tokens: int = size(320, "tokens of a response")
    peer_new_tokens: int = size(64, "tokens that transformers' continuous batching samples: its step takes long")
    draws: int = size(65536, "samples of two tokens for the test of the distribution")
    tokens: int = size(16384, "logp: tokens")
    hidden: int = size(2560, "logp: hidden size")
    vocab: int = size(151936, "logp: vocabulary")
    groups: int = size(64, "train and step: prompts")
    samples: int = size(8, "train and step: responses to each")
    micro: int = size(64, "responses in one pass of TRL")
    matmul: int = size(8192, "side of the square product that measures the matrix rate")
    copy: int = size(2**31, "bytes of the copy that measures the memory rate")
    repeats: int = size(3, "of what takes seconds; medians are shown")
    device: str = "cuda"
    quick: bool = False

    @property
    def dtype(self) -> str:
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return 4 if self.device == "cpu" else 2


CPU = Sizes(
    model="tiny",
    small="tiny",
    prompts=8,
    slots=16,
    prompt_tokens=12,
    new_tokens=16,
    peer_new_tokens=8,
    draws=2048,
    tokens=64,
    hidden=32,
    vocab=512,
    groups=4,
    samples=4,
    micro=8,
    matmul=256,
    copy=2**24,
    repeats=1,
    device="cpu",
)  # small enough for seconds: on a CPU the parts are only there to be tried out
FLAGS = tuple(f for f in fields(Sizes) if f.metadata)


def sizes_for(device: str, quick: bool = False, **given: Any) -> Sizes:
    """The defaults of the device, halved where that can be for --quick, with what was given."""
    made = CPU if device == "cpu" else Sizes(device=device)
    if quick:
        made = replace(
            made,
            quick=True,
            repeats=1,
            peer_new_tokens=max(2, made.peer_new_tokens // 2),
            draws=made.draws // 2,
            tokens=made.tokens // 2,
            groups=made.groups // 2,
        )
    return replace(made, **{name: value for name, value in given.items() if value is not None})
