"""How a run fails: in one line."""

from __future__ import annotations

import torch
from safetensors import SafetensorError

from ..distributed.ranks import RankFailed
from ..loss.advantages import BadRewards
from ..rollout import NotFinite, TooManyKept
from ..run import checkpoint
from ..secrets import hidden
from ..tasks import RewardError
from .oom_retry import DoesNotFit
from .samples.collect import PromptTooLong

EXPECTED = (
    checkpoint.CheckpointError,
    RewardError,
    PromptTooLong,
    NotFinite,
    TooManyKept,
    BadRewards,
    OSError,
    SafetensorError,
    torch.OutOfMemoryError,
    RankFailed,
)  # one line each


class Failed(ValueError):
    """The run cannot go on; its text is one line. ``setup``: nothing was done yet, what was asked for is impossible."""

    def __init__(self, message: str, setup: bool = False):
        super().__init__(hidden(" ".join(message.split())))
        self.setup = setup


def one_line(error: BaseException) -> str:
    """In one line; of an error that nobody expects, with its name."""
    if isinstance(error, torch.OutOfMemoryError) and not isinstance(error, DoesNotFit):
        return "the device is out of memory: lower optim.micro_tokens (training) or rollout.slots (sampling)"
    text = " ".join(str(error).split())
    return text if isinstance(error, (Failed, *EXPECTED)) and text else f"{type(error).__name__}: {text}"
