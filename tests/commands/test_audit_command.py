"""rpg audit: what it says of the losses that are off, and of one alone."""

import pytest

from rpg import cli


@pytest.fixture
def audit(capsys):
    def run(*argv):
        code = cli.main(["audit", *map(str, argv)])
        return code, *capsys.readouterr()

    return run


def test_strict_ends_with_the_losses_that_are_off_and_where(audit):
    code, _, err = audit("dapo", "grpo", "atr-grpo", "rloo", "--strict", "--seeds", 1)
    assert code == 1
    assert err.splitlines() == [
        "rpg audit: off by more than 1e-06:",
        "  grpo: all six settings; in the box: ref=old, three policies; top-p: 0.95, 0.9, 0.7",
        "  atr-grpo: variable lengths: on-policy, ref=old, three policies",
        "  rloo: fixed lengths: ref=old, three policies; variable lengths: ref=old, three policies; "
        "in the box: ref=old, three policies; top-p: 0.95, 0.9, 0.7",
    ]


def test_one_is_not_several(audit):
    _, out, _ = audit("rpg-urkl", "--seeds", 1)
    assert out.splitlines()[:3] == [
        "rpg-urkl has the exact gradient in all six settings.",
        "As shipped, inside its clip, it is exact; under top-p 0.9 sampling it is exact.",
        "Relative bias of the expected gradient against the exact one; β = 0.1, median of 1 seed.",
    ]
    _, out, _ = audit("rpg-urkl", "grpo", "--seeds", 1)
    assert out.startswith(
        "1 of 2 losses has the exact gradient in every setting; 1 in none.\n"
        "As shipped, inside their clip, 1 of 2 is exact; under top-p 0.9 sampling 1.\n"
    )
    _, out, _ = audit("grpo", "--seeds", 1)
    assert "As shipped, inside its clip, it is off by 0.075 %; under top-p 0.9 sampling it is off by 2.1 %." in out


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 1 / 0", "raised ZeroDivisionError: division by zero (called with logp [15, 3], old_logp [15, 3], "),
        ("assert mask.all()", "raised AssertionError (called with logp [15, 3], "),
        ("return old_logp.requires_grad_().sum() * 2", "must return a loss that depends on logp; it has no gradient"),
    ],
)
def test_a_loss_that_raises_is_named_with_its_exception(audit, tmp_path, body, says):
    (tmp_path / "my.py").write_text(f"def loss(logp, old_logp, advantages, mask, ref_logp, beta):\n    {body}\n")
    code, out, err = audit(f"{tmp_path}/my.py:loss")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"rpg audit: {tmp_path}/my.py:loss {says}")
    if "called" in says:
        assert err.endswith("advantages [15], mask [15, 3], ref_logp [15, 3], beta 0.1)\n")


def test_a_loss_that_raises_on_a_later_batch_is_one_line_too(audit, tmp_path):
    (tmp_path / "my.py").write_text(
        "calls = []\ndef loss(logp, old_logp, advantages, mask):\n    calls.append(1)\n"
        "    return (logp * mask).sum() * (1 // (len(calls) < 5))\n"
    )
    code, _, err = audit(f"{tmp_path}/my.py:loss", "--seeds", 1)
    assert (code, "Traceback" in err) == (2, False)
    assert ":loss raised ZeroDivisionError: " in err.splitlines()[-1]


CLIPPED = """import torch
def loss(logp, old_logp, advantages, mask, ref_logp, beta):
    w, a = (logp - old_logp).exp(), advantages[:, None]
    pg = torch.min(w * a, w.clamp(0.8, 1.2) * a)
    return ((beta * w * (logp - ref_logp) - pg) * mask).sum() / mask.sum()
"""


def test_a_clip_of_yours_is_exact_at_the_drift_that_is_said_to_be_inside_it(audit, tmp_path):
    (tmp_path / "my.py").write_text(CLIPPED)
    code, out, err = audit(f"{tmp_path}/my.py:loss", "--divergence", "rkl", "--drift", 0.05, "--strict", "--seeds", 25)
    assert (code, err) == (0, "")
    assert "✓ everywhere" in out


def test_what_fails_in_a_seed_is_said_where_the_median_is_exact(audit, tmp_path):
    (tmp_path / "my.py").write_text(CLIPPED)
    code, out, err = audit(f"{tmp_path}/my.py:loss", "--divergence", "rkl", "--drift", 0.06, "--strict", "--seeds", 7)
    assert code == 1
    assert err.endswith("my.py:loss: fixed lengths: ref=old, three policies\n")
    assert "my.py:loss has the exact gradient in most seeds, but not in all.\n" in out
    assert "~ not all seeds" in out
    assert "my.py:loss: exact in the median, but its worst of 7 seeds is off by " in out


def test_the_hint_at_a_clip_does_not_repeat_a_flag_that_was_given(audit, tmp_path):
    (tmp_path / "my.py").write_text(CLIPPED.replace("0.8, 1.2", "0.999, 1.001"))
    hint = "(a clip?): --drift 0.05 keeps ratios inside ±20 %"
    assert hint in audit(f"{tmp_path}/my.py:loss", "--seeds", 1)[2]
    assert "(a clip?): yet --drift 0.05 keeps" in audit(f"{tmp_path}/my.py:loss", "--seeds", 1, "--drift", 0.05)[2]


def test_a_beta_of_its_own_and_no_kl_at_all_are_told_how_to_be_audited(audit, tmp_path):
    (tmp_path / "my.py").write_text(
        "def least(logp, old_logp, advantages, mask, ref_logp):\n"
        "    ratio = (logp - old_logp).exp()\n"
        "    return -(ratio * advantages[:, None] * mask).sum()\n"
        "def loss(logp, old_logp, advantages, mask, ref_logp):\n"
        "    ratio = (logp - old_logp).exp()\n"
        "    kl = ratio * (logp - ref_logp)\n"
        "    return least(logp, old_logp, advantages, mask, ref_logp) + 0.04 * (kl * mask).sum()\n"
        "number = 1\n"
    )
    _, out, _ = audit(f"{tmp_path}/my.py:loss", "--divergence", "rkl", "--seeds", 1)
    assert "the KL counts 0.4 times\nA loss with a β of its own has to be audited with it: --beta\n" in out
    _, out, _ = audit(f"{tmp_path}/my.py:loss", "--divergence", "rkl", "--seeds", 1, "--beta", 0.04)
    assert "in all six settings" in out
    assert "--beta" not in out
    _, out, _ = audit(f"{tmp_path}/my.py:least", "--seeds", 1)
    assert "or left out?)\nA loss that has no KL term on purpose: --divergence none\n" in out
    assert audit("grpo", "--seeds", 1)[1].count("--divergence") == 0
    _, _, err = audit(f"{tmp_path}/my.py:los")
    assert err.endswith("Did you mean 'loss'? Known: least, loss\n")
