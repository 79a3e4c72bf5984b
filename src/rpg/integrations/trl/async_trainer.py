"""RPGAsyncTrainer: TRL's experimental AsyncGRPOTrainer, which trains while a vLLM server samples, with a loss of rpg.

TRL streams weights to the server, packs what it sends back, and has computed advantages by then. What it calls old is
what each token was drawn from, in whichever weights: with a ratio over it, a loss is exact. Only ``compute_loss`` is
overridden. TRL's own still runs, for its forward pass and its metrics, and its loss is put aside.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.logging import get_logger  # type: ignore[import-untyped]
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from ...loss.clip import Adaptive
from ...loss.methods import Algorithm, Method
from ...loss.methods import algorithm as preset
from .config import DEFAULT

logger = get_logger(__name__)


class RPGAsyncTrainer(AsyncGRPOTrainer):  # type: ignore[misc]
    """AsyncGRPOTrainer with a preset's name or an Algorithm. Other arguments are TRL's."""

    def __init__(
        self,
        model: str,
        reward_funcs: Any = None,
        args: AsyncGRPOConfig | None = None,
        *more: Any,
        algorithm: str | Algorithm = DEFAULT,
        **named: Any,
    ):
        chosen = preset(algorithm) if isinstance(algorithm, str) else algorithm
        self.method = chosen.resolve(dynamic=False, overlong=False)
        refuse(self.method)
        for name, ours in {"epsilon": "low", "epsilon_high": "high"}.items():
            default = AsyncGRPOConfig.__dataclass_fields__[name].default
            if args is not None and getattr(args, name) != default:
                raise ValueError(f"{name} is decided by the algorithm here: give rpg.algorithm(…, {ours}=…)")
        super().__init__(model, reward_funcs, args, *more, **named)
        logger.warning(
            f"{self.method.name}: advantages are TRL's, (reward - mean) / std over a group; "
            "no group is dropped, and no length penalised"
        )

    def compute_loss(self, model: Any, inputs: dict[str, Any], *more: Any, **named: Any) -> Tensor:
        seen: list[Any] = []

        def looked_at(**batch: Any) -> Any:
            seen.append(model(**batch))
            return seen[0]

        super().compute_loss(looked_at, inputs, *more, **named)
        (outputs,) = seen
        tokens = inputs["token_index"] >= 0
        response_N = inputs["segment_id"][tokens]
        length_B = response_N.bincount()
        mask_BT = torch.arange(int(length_B.max()), device=length_B.device) < length_B.unsqueeze(-1)
        logp_N = outputs.log_probs.flatten()[inputs["token_index"][tokens]]
        advantage_B = torch.zeros(len(length_B), device=logp_N.device)
        advantage_B[response_N] = inputs["advantages"][tokens].to(advantage_B)  # the same for all tokens of a response
        rule, old_BT = self.method.loss, padded(inputs["old_log_probs"][tokens], mask_BT)
        micro_batches = self.current_gradient_accumulation_steps
        out = rule(
            padded(logp_N, mask_BT),
            old_BT,
            advantage_B,
            mask_BT,
            ref_logp=old_BT if "ref_logp" in rule.needs else None,
            denominator=max(rule.step_denominator(mask_BT), 1.0) * micro_batches,
        )
        for name, value in out.metrics.items():
            self._metrics["train"][f"rpg/{name}"].append((float(value) * len(logp_N), float(len(logp_N))))
        loss: Tensor = out.loss
        return loss + self.router_aux_loss_coef * outputs.aux_loss / micro_batches if self.aux_loss_enabled else loss


def padded(x_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Tokens of responses laid end to end, as rows."""
    return torch.zeros(mask_BT.shape, dtype=x_N.dtype, device=x_N.device).masked_scatter(mask_BT, x_N)


def refuse(method: Method) -> None:
    """What TRL's asynchronous trainer has not."""
    loss, name = method.loss, f"{method.name} cannot run in TRL's asynchronous trainer"
    reasons = {
        f"{method.only_here}": bool(method.only_here),
        "its baseline is the reward of a greedy response": method.needs_greedy,
        "it has a KL in the reward": method.advantage.beta > 0,
        'no reference is held: rpg.algorithm(…, reference="old") anchors the KL at the sampler': method.anchor != "old",
        "responses come from earlier weights, and it has no ratio that accounts for them": not loss.has_ratio,
        "old is the sampler's, so that a mismatch rule has nothing to compare": loss.needs_sampler,
        "it is fitted to the whole optimiser step": isinstance(loss.clip, Adaptive) or loss.control_variate,
        "its advantage is one for each token": method.advantage.per_token,
    }
    for why, wrong in reasons.items():
        if wrong:
            raise ValueError(f"{name}: {why}")
