"""Old log-probabilities: the engine's, or computed again."""

import pytest
import torch

import rpg
from rpg.run.config import Config, RolloutConfig
from rpg.training.old_logp import HARMLESS, OldLogp


def old_logp(algorithm="dapo", dtype=torch.bfloat16, **rollout):
    return OldLogp(Config(rollout=RolloutConfig(**rollout)), rpg.algorithm(algorithm).loss, dtype)


def test_old_logp_are_the_engines_while_the_mismatch_is_harmless():
    rule = old_logp()
    assert rule.recompute  # nothing is known yet
    seen = []
    for kl in (HARMLESS / 2, HARMLESS * 2, None, HARMLESS / 2, None):
        rule.measure({} if kl is None else {"mismatch/kl": kl})
        seen.append(rule.recompute)
    assert seen == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("expected", "how"),
    [
        (False, {"dtype": torch.float32}),
        (True, {"dtype": torch.float32, "old_logp": "recompute"}),
        (False, {"old_logp": "engine"}),
        (True, {"old_logp": "recompute"}),
        (False, {"top_p": 0.9, "dtype": torch.float32}),
        (True, {"top_p": 0.9, "old_logp": "recompute"}),
        (True, {"algorithm": "gspo"}),  # at sequence level
        (False, {"algorithm": "gspo", "dtype": torch.float32}),
    ],
)
def test_old_logp_where_no_measurement_decides(expected, how):
    rule = old_logp(**how)
    for kl in (0.0, 1.0):
        rule.measure({"mismatch/kl": kl})
        assert rule.recompute == expected


def test_a_mismatch_rule_has_something_to_correct():
    loss = rpg.algorithm("dapo", mismatch=rpg.mismatch.TIS()).loss
    for dtype in (torch.float32, torch.bfloat16):
        rule = OldLogp(Config(), loss, dtype)
        rule.measure({"mismatch/kl": 0.0})
        assert rule.recompute
    with pytest.raises(ValueError, match=r"^rollout.old_logp=engine leaves loss.mismatch nothing to correct[^\n]*$"):
        OldLogp(Config(rollout=RolloutConfig(old_logp="engine")), loss, torch.bfloat16)
