"""Other people's fused heads, as installed: TRL's, Liger's GRPO loss, Apple's cut cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .sizes import Sizes

if TYPE_CHECKING:
    from .logp import Problem, Scoring

SEQUENCES = 32  # of Liger's batch


@dataclass(frozen=True)
class Peer:
    run: Callable[[], object]  # forward and backward
    scoring: Scoring | None  # None: it gives a loss only


def trl(problem: Problem, sizes: Sizes) -> Peer:
    """The head that TRL's GRPOTrainer puts into a model: log-probabilities and entropies, without logits."""
    from .logp import both_ways

    found = _installed("trl.trainer.utils")
    function, chunk = found._ChunkedLogProbFunction, found._CHUNKED_LOGPROB_CHUNK_SIZE

    def scoring(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor | None]:
        logp_N, entropy_N, *_ = function.apply(
            hidden_NH, weight_VH, None, target_N, 1.0, chunk, None, 1.0, ("log_probs", "entropy")
        )
        return logp_N, entropy_N

    return Peer(lambda: both_ways(scoring, problem), scoring)


def liger(problem: Problem, sizes: Sizes) -> Peer:
    """LigerFusedLinearGRPOLoss with its defaults, without a reference: the old policy is the present one."""
    import torch

    loss = _installed("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
    _gpu_only(sizes)
    rows = min(SEQUENCES, sizes.tokens)
    shape = rows, sizes.tokens // rows
    mask_BT = torch.ones(shape, device=sizes.device)
    advantage_B = torch.randn(rows, device=sizes.device)

    def run() -> None:
        problem.hidden_NH.grad = problem.weight_VH.grad = None
        hidden_BTH = problem.hidden_NH.view(*shape, -1)
        found, _ = loss(hidden_BTH, problem.weight_VH, problem.target_N.view(shape), mask_BT, advantage_B)
        found.backward()

    return Peer(run, None)


def cut_cross_entropy(problem: Problem, sizes: Sizes) -> Peer:
    from .logp import both_ways

    function = _installed("cut_cross_entropy").linear_cross_entropy
    _gpu_only(sizes)

    def scoring(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor | None]:
        return -function(hidden_NH, weight_VH, target_N, reduction="none"), None

    return Peer(lambda: both_ways(scoring, problem), scoring)


def _installed(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError("not installed") from error


def _gpu_only(sizes: Sizes) -> None:
    if sizes.device == "cpu":
        raise ValueError("it needs a GPU")


PEERS: dict[str, Callable[[Problem, Sizes], Peer]] = {
    "TRL's fused head": trl,
    "Liger GRPO loss": liger,
    "cut-cross-entropy": cut_cross_entropy,
}
