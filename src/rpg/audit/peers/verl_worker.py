"""Runs verl's own actor loss and returns its gradient, in whichever interpreter has verl.

verl cannot share an environment with current TRL. So `Client` starts this file as a script under another interpreter
and talks to it in JSON, one request and one answer per line. Hence the rule: standard library, torch and verl only,
never `rpg`. Where verl is importable, `answer` can be called directly instead.

What runs is `verl.workers.utils.losses.ppo_loss`, the function that verl's actor worker hands to its engine: policy
loss, KL loss and aggregation are all verl's; this file only packs the inputs as the engine packs them.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from typing import Any

import torch
from torch import Tensor

WIDE = 1e9  # a clip bound that never acts
_SEQUENCE_MODES = ("seq-mean-token-mean", "seq-mean-token-sum")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request: {"op": "hello"} or {"op": "coefficients", ...} (see `coefficients`)."""
    if request["op"] == "hello":
        return hello()
    arguments = {key: value for key, value in request.items() if key != "op"}
    return {"coefficients": coefficients(**arguments)}


def hello() -> dict[str, Any]:
    """Import verl (slow, and the moment at which a broken installation shows) and say what was found."""
    from importlib.metadata import version

    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    if not ppo_loss.__module__.startswith("verl."):
        raise RuntimeError("a plugin has replaced verl's loss: set VERL_USE_EXTERNAL_PLUGINS=none to audit verl's own")
    names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "kl_loss_type", "tau_pos", "tau_neg")
    return {"version": version("verl"), "defaults": {name: getattr(ActorConfig, name) for name in names}}


def coefficients(
    loss_mode: str,
    kl_loss_type: str | None,
    beta: float,
    clip: bool,
    loss_agg_mode: str | None,
    logp: list[list[float]],
    old_logp: list[list[float]],
    ref_logp: list[list[float]],
    advantages: list[float],
    mask: list[list[bool]],
) -> list[list[float]]:
    """d ppo_loss / d logp of each token times the aggregation's global denominator; 0 where masked.

    kl_loss_type None leaves the KL loss out, loss_agg_mode None keeps the configuration's default, and clip False
    opens every clip bound; everything else is the default of verl's configuration classes.
    """
    from verl.workers.utils.losses import ppo_loss

    mask_NT = torch.tensor(mask, dtype=torch.bool)
    logp_NT = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    config = _actor_config(loss_mode, kl_loss_type, beta, clip, loss_agg_mode)
    data = _engine_batch(
        mask_NT,
        old_log_probs=torch.tensor(old_logp, dtype=torch.float64),
        ref_log_prob=torch.tensor(ref_logp, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64)[:, None].expand(mask_NT.shape),
    )
    loss, _ = ppo_loss(config, {"log_probs": _packed_log_probs(logp_NT, mask_NT)}, data)
    (grad_NT,) = torch.autograd.grad(loss, logp_NT)
    return (grad_NT * _denominator(config.loss_agg_mode, mask_NT)).tolist()


def _actor_config(loss_mode: str, kl_loss_type: str | None, beta: float, clip: bool, loss_agg_mode: str | None) -> Any:
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    options: dict[str, Any] = {"policy_loss": PolicyLossConfig(loss_mode=loss_mode)}
    if kl_loss_type is not None:
        options |= {"use_kl_loss": True, "kl_loss_coef": beta, "kl_loss_type": kl_loss_type}
    if loss_agg_mode is not None:
        options["loss_agg_mode"] = loss_agg_mode
    if not clip:
        options |= dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), WIDE)
    return FSDPActorConfig(rollout_n=1, use_dynamic_bsz=True, **options)


def _engine_batch(mask_NT: Tensor, **fields_NT: Tensor) -> Any:
    """The TensorDict that verl's engine passes to its loss: ragged tensors, and the global batch's sizes as plain data.

    One process holds the whole batch, so the global sizes are this batch's own.
    """
    from verl.utils import tensordict_utils as tu

    def ragged(values_NT: Tensor) -> Tensor:
        rows = [row[keep] for row, keep in zip(values_NT, mask_NT, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    tokens_NT = torch.zeros(mask_NT.shape, dtype=torch.long)
    prompts = torch.nested.as_nested_tensor(list(torch.zeros(len(mask_NT), 1, dtype=torch.long)), layout=torch.jagged)
    tensors = {"prompts": prompts, "responses": ragged(tokens_NT), "response_mask": ragged(mask_NT.long())}
    tensors |= {name: ragged(values_NT) for name, values_NT in fields_NT.items()}
    sizes = {
        "dp_size": 1,
        "batch_num_tokens": int(mask_NT.sum()),
        "global_batch_size": len(mask_NT),
        "max_response_len": mask_NT.shape[1],
    }
    return tu.get_tensordict(tensors, sizes)


def _packed_log_probs(logp_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """The model output as verl packs it: prompt (one token) and response in a row, each log-probability stored at the
    position before its token. So a response of n tokens is its n log-probabilities and one unused last entry."""
    rows = [torch.cat([row[keep], row.new_zeros(1)]) for row, keep in zip(logp_NT, mask_NT, strict=True)]
    return torch.cat(rows)


def _denominator(loss_agg_mode: str, mask_NT: Tensor) -> int:
    if loss_agg_mode == "token-mean":
        return int(mask_NT.sum())
    if loss_agg_mode in _SEQUENCE_MODES:
        return len(mask_NT)
    raise ValueError(f"no denominator known for loss_agg_mode {loss_agg_mode!r}")


class Client:
    """This file under another interpreter, kept running because importing verl takes some ten seconds."""

    def __init__(self, python: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        # PYTHONSAFEPATH: the names of the modules beside this file must not shadow what the worker imports
        # VERL_USE_EXTERNAL_PLUGINS: verl as installed, without the plugin that would bring our losses into it
        self._process = subprocess.Popen(
            [python, os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONSAFEPATH": "1", "VERL_USE_EXTERNAL_PLUGINS": "none"},
        )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        reply = json.loads(line) if line else {"error": f"the verl worker stopped\n{self._last_words()}"}
        if "error" in reply:
            raise RuntimeError(reply["error"].strip())
        return reply

    def close(self) -> None:
        """End of input ends the worker."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]


def main() -> None:
    """Serve requests until standard input closes. verl and ray print, so answers take the original standard output
    and everything else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception:
            reply = {"error": traceback.format_exc()}
        answers.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
