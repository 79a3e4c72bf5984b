"""What a step trains on: new groups, and those that serve again, as long as they are worth it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...loss.methods import Method
from ...run.config import Config
from ...tasks import ENDLESS, Task
from ..batch import Batch
from ..progress import SamplingPosition
from .choice import PromptChoice
from .collect import Collector, Experience, Sampler
from .replay import Replay
from .stored import read_groups, write_groups
from .stream import StreamCollector
from .worth import budgeted, keep_pace, without, worth_of


class SampleSource:
    """``collect`` gives a step's groups; ``sift`` drops what is no longer worth training on; ``served``, at the end of
    the step, keeps what may serve again. What is held between steps is in the checkpoints."""

    def __init__(self, config: Config, method: Method, sampler: Sampler, task: Task, position: SamplingPosition):
        self.config, self.method, self.task, self.position = config, method, task, position
        kind = StreamCollector if config.rollout.ahead else Collector
        self.collector = kind(config, method, sampler, task, position)
        if config.rollout.choose == "signal":
            again = len(task.train) < ENDLESS
            self.collector.choice = PromptChoice(position, config.seed, config.rollout.samples, again)
        self.replay = Replay(config.offpolicy, config.rollout.prompts)
        self.all_dropped = False  # in the last step

    @property
    def signal(self) -> str:
        return self.collector.signal

    def collect(self, step: int) -> Experience:
        self.all_dropped = False
        return self.replay.join(self.collector.collect(step, self.replay.fresh(step)), step)

    def judges(self, experience: Experience, step: int) -> bool:
        """Whether ``sift`` asks for the log-probabilities of the policy as it is now."""
        return budgeted(self.config.offpolicy) and any(experience.lags(step))

    def sift(
        self, experience: Experience, batch: Batch, now_BT: Tensor | None, step: int
    ) -> tuple[Experience, Batch, Tensor | None]:
        """Without the groups that the policy has left too far, which are counted. ``now_BT`` goes with the batch."""
        more, dropped = self._ages(experience, step), 0
        if self.judges(experience, step) and now_BT is not None:
            loss, groups = self.method.loss, experience.groups
            worth = worth_of(batch, batch.old_logp_BT, now_BT, loss.level, loss.max_log_ratio)
            stays_K = worth.enough(self.config.offpolicy)
            more |= {
                "worth/ess": float(worth.ess_K.mean()),
                "worth/ess_min": float(worth.ess_K.min()),
                "worth/kl": float(worth.kl_K.mean()),
                "worth/kl_max": float(worth.kl_K.max()),
            }
            dropped = int((~stays_K).sum())
            if dropped:
                stays = [group for group, stay in zip(groups, stays_K.tolist(), strict=True) if stay]
                gone = [group for group, stay in zip(groups, stays_K.tolist(), strict=True) if not stay]
                self.replay.served([], gone)
                experience = replace(experience, groups=stays, dropped=gone)
                self.all_dropped = not stays
                if stays:
                    batch, (now_BT,) = without(batch, [now_BT], stays_K)
        if budgeted(self.config.offpolicy):
            more["worth/dropped"] = float(dropped)
        if budgeted(self.config.offpolicy) and self.config.rollout.ahead:
            keep_pace(self.position, dropped, len(experience.groups) + dropped)
            more["worth/pace"] = self.position.pace
        return replace(experience, more=experience.more | more), batch, now_BT

    def _ages(self, experience: Experience, step: int) -> dict[str, float]:
        if not self.config.stale:
            return {}
        lags = experience.lags(step)
        again = [step - group.step for group in experience.groups if group.uses]
        metrics = {"lag/mean": sum(lags) / len(lags), "lag/max": float(max(lags)), "replay/groups": float(len(again))}
        return metrics | ({"replay/age": sum(again) / len(again)} if again else {})

    def served(self, experience: Experience) -> None:
        self.replay.served(experience.groups, [])

    def close(self) -> None:
        if isinstance(self.collector, StreamCollector):
            self.collector.close()

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Values for state.json, and tensors; empty where steps leave nothing behind."""
        values: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        if isinstance(self.collector, StreamCollector):
            values, tensors = self.collector.state()
        if self.replay.groups:
            values["replay"], more = write_groups("replay", self.replay.groups)
            tensors = tensors | more
        return values | {"tensors": bool(tensors)} if values else {}, tensors

    def load(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if isinstance(self.collector, StreamCollector):
            self.collector.load(values, tensors)
        self.replay.groups = read_groups("replay", values.get("replay", []), tensors, self.task)
