"""The adapters against the textbook form of each peer's coefficient, on random batches.

A wrong number here means that an adapter feeds a peer something it does not mean, or that the peer has changed: both
must be known before its row is shown to anybody.
"""

import functools
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from rpg.audit import peers as module
from rpg.audit.peers import peers
from rpg.console import install

BETA = 0.3
LENGTHS = (4, 1, 2, 3, 4, 2, 3)


def tolerance(peer):
    """float32 for Liger; otherwise what is left of verl's 1e-8 beside |y| and of TRL's float32 SAPO temperatures."""
    if peer.dtype == torch.float32:
        return {"rtol": 2e-4, "atol": 2e-5}
    return {"rtol": 1e-6, "atol": 1e-7} if "sapo" in peer.name else {"rtol": 1e-7, "atol": 1e-9}


@functools.cache
def found():
    rows, messages = peers()
    return {row.name: row for row in rows}, messages


def row(name):
    library = name.split()[0]
    if library == "verl":
        if find_spec("verl") is None and not os.environ.get("RPG_VERL_PYTHON"):
            pytest.skip("verl is not importable here and RPG_VERL_PYTHON does not name an interpreter that has it")
    else:
        pytest.importorskip({"trl": "trl", "liger": "liger_kernel"}[library])
    rows, messages = found()
    assert name in rows, messages
    return rows[name]


def random_batch(seed=0, on_policy=False, scale=0.7):
    generator = torch.Generator().manual_seed(seed)
    num, steps, vocab = len(LENGTHS), max(LENGTHS), 5
    mask_NT = torch.arange(steps) < torch.tensor(LENGTHS)[:, None]
    tokens_NT = torch.randint(vocab, (num, steps), generator=generator)
    logits = [scale * torch.randn(num, steps, vocab, generator=generator, dtype=torch.float64) for _ in range(3)]
    if on_policy:
        logits[1] = logits[0]
    logp_NT, old_NT, ref_NT = (x.log_softmax(-1).gather(-1, tokens_NT[..., None])[..., 0] for x in logits)
    return SimpleNamespace(
        tokens_NT=tokens_NT,
        logits_NTV=logits[0],
        logp_NT=logp_NT,
        old_logp_NT=old_NT,
        ref_logp_NT=ref_NT,
        advantages_N=torch.randn(num, generator=generator, dtype=torch.float64),
        mask_NT=mask_NT,
    )


class Terms:
    """The pieces that the textbook coefficients are made of."""

    def __init__(self, batch):
        self.mask = batch.mask_NT.double()
        log_w = (batch.logp_NT - batch.old_logp_NT) * self.mask
        self.w, self.A = log_w.exp(), batch.advantages_N[:, None]
        self.length = self.mask.sum(1, keepdim=True)
        self.S = (log_w.sum(1, keepdim=True) / self.length).exp()  # GSPO's ratio
        self.W = log_w.sum(1, keepdim=True).exp()
        self.log_u = (batch.logp_NT - batch.ref_logp_NT) * self.mask
        self.k3 = (-self.log_u).exp() - 1 + self.log_u
        self.dk3 = 1 - (-self.log_u).exp()

    def sapo(self, tau_positive=1.0, tau_negative=1.05):
        tau = torch.full_like(self.A, tau_negative).masked_fill(self.A > 0, tau_positive)
        gate = torch.sigmoid(tau * (self.w - 1))
        return -self.A * 4 * gate * (1 - gate) * self.w


# name -> c / mask of the unclipped loss
TEXTBOOK = {
    "trl grpo (no KL)": lambda t: -t.A * t.w / t.length,
    "trl dapo (no KL)": lambda t: -t.A * t.w,
    "trl dr_grpo (no KL)": lambda t: -t.A * t.w,
    "trl bnpo (no KL)": lambda t: -t.A * t.w,
    "trl cispo (no KL)": lambda t: -t.A * t.w,
    "trl sapo (no KL)": lambda t: t.sapo() / t.length,
    "trl gspo (no KL)": lambda t: -t.A * t.S / t.length,
    "trl rloo (no KL)": lambda t: -t.A * t.W,
    "trl grpo": lambda t: (-t.A * t.w + BETA * t.w * t.log_u) / t.length,
    "trl grpo (no KL correction)": lambda t: (-t.A * t.w + BETA * t.dk3) / t.length,
    "trl dapo": lambda t: -t.A * t.w + BETA * t.w * t.log_u,
    "trl dapo (no KL correction)": lambda t: -t.A * t.w + BETA * t.dk3,
    "trl dr_grpo": lambda t: -t.A * t.w + BETA * t.w * t.log_u,
    "trl bnpo": lambda t: -t.A * t.w + BETA * t.w * t.log_u,
    "trl cispo": lambda t: -t.A * t.w + BETA * t.w * t.log_u,
    "trl sapo": lambda t: (t.sapo() + BETA * t.w * t.log_u) / t.length,
    # the weight of the whole response multiplies every token's k3, so each token also moves the others' terms
    "trl gspo": lambda t: t.S * (-t.A + BETA * (t.dk3 + t.k3.sum(1, keepdim=True) / t.length)) / t.length,
    "trl gspo (no KL correction)": lambda t: (-t.A * t.S + BETA * t.dk3) / t.length,
    "liger grpo (no KL)": lambda t: -t.A * t.w / t.length,
    "liger grpo": lambda t: (-t.A * t.w + BETA * t.dk3) / t.length,
    "liger grpo (KL correction)": lambda t: (-t.A * t.w + BETA * t.w * t.log_u) / t.length,
    "liger dapo": lambda t: -t.A * t.w + BETA * t.dk3,
    "liger dapo (KL correction)": lambda t: -t.A * t.w + BETA * t.w * t.log_u,
    "liger dr_grpo": lambda t: -t.A * t.w + BETA * t.dk3,
    "liger bnpo": lambda t: -t.A * t.w + BETA * t.dk3,
    "liger cispo": lambda t: -t.A * t.w + BETA * t.dk3,
    "liger sapo": lambda t: (t.sapo() + BETA * t.dk3) / t.length,
    "liger gspo": lambda t: (-t.A * t.S + BETA * t.dk3) / t.length,
    "verl vanilla (no KL)": lambda t: -t.A * t.w,
    "verl vanilla + kl": lambda t: -t.A * t.w + BETA,
    "verl vanilla + abs": lambda t: -t.A * t.w + BETA * t.log_u.sign(),
    "verl vanilla + mse": lambda t: -t.A * t.w + BETA * t.log_u,
    "verl vanilla + low_var_kl": lambda t: -t.A * t.w + BETA * t.dk3,
    "verl vanilla + k1+": lambda t: -t.A * t.w + BETA * t.log_u,
    "verl vanilla + k3+": lambda t: -t.A * t.w + BETA * t.log_u,
    "verl vanilla, sequence mean + low_var_kl": lambda t: (-t.A * t.w + BETA * t.dk3) / t.length,
    "verl gspo + low_var_kl": lambda t: -t.A * t.S + BETA * t.dk3,
    "verl gspo, sequence mean + low_var_kl": lambda t: (-t.A * t.S + BETA * t.dk3) / t.length,
    "verl cispo + low_var_kl": lambda t: -t.A * t.w + BETA * t.dk3,
    "verl gpg + low_var_kl": lambda t: -t.A + BETA * t.dk3,
    "verl geo_mean + low_var_kl": lambda t: (-t.A * t.S + BETA * t.dk3) / t.length,
    "verl sapo + low_var_kl": lambda t: (t.sapo() + BETA * t.dk3) / t.length,
    "verl dppo_tv + low_var_kl": lambda t: -t.A * t.w + BETA * t.dk3,
    "verl dppo_kl + low_var_kl": lambda t: -t.A * t.w + BETA * t.dk3,
}


@pytest.mark.parametrize("name", TEXTBOOK)
@pytest.mark.parametrize("on_policy", [True, False])
def test_unclipped_coefficient_is_the_textbook_one(name, on_policy):
    peer = row(name)
    for seed in range(3):
        batch = random_batch(seed, on_policy)
        terms = Terms(batch)
        expected_NT = (TEXTBOOK[name](terms) * terms.mask).expand(batch.mask_NT.shape)
        c_NT = peer.coefficients(batch, BETA)
        assert c_NT.dtype == torch.float64
        torch.testing.assert_close(c_NT, expected_NT, **tolerance(peer))


@pytest.mark.parametrize("name", ["trl dapo", "liger dapo (KL correction)", "verl vanilla + low_var_kl"])
def test_default_clip_drops_the_policy_term_and_keeps_the_kl_term(name):
    peer = row(name)
    batch = random_batch(3, scale=1.5)
    terms = Terms(batch)
    dropped_NT = torch.where(terms.A > 0, terms.w > 1.2, (terms.w < 0.8) | ((terms.w > 3) & name.startswith("verl")))
    assert (dropped_NT & batch.mask_NT).any()
    verl_kl_NT = torch.where(terms.k3 > 10, 0.0, terms.dk3)
    kl_NT = verl_kl_NT if name.startswith("verl") else terms.w * terms.log_u
    expected_NT = (torch.where(dropped_NT, 0.0, -terms.A * terms.w) + BETA * kl_NT) * terms.mask
    torch.testing.assert_close(peer.clipped(batch, BETA), expected_NT, **tolerance(peer))


@pytest.mark.parametrize(("name", "factor"), [("trl cispo", 0.2), ("liger cispo", 0.2), ("verl cispo", 1.0)])
def test_default_cispo_clip_on_policy(name, factor):
    """TRL and Liger read epsilon_high as a bound on the ratio and leave it at 0.2: the default scales the policy term
    by 0.2 even where the ratio is 1."""
    peer = row(f"{name} (no KL)")
    batch = random_batch(on_policy=True)
    expected_NT = -factor * batch.advantages_N[:, None] * batch.mask_NT
    torch.testing.assert_close(peer.clipped(batch, BETA), expected_NT, **tolerance(peer))


@pytest.mark.parametrize("name", ["trl vespo (no KL)", "liger vespo (no KL)"])
def test_vespo_on_policy_is_reinforce(name):
    peer = row(name)
    batch = random_batch(on_policy=True)
    expected_NT = -batch.advantages_N[:, None] * batch.mask_NT
    torch.testing.assert_close(peer.coefficients(batch, BETA), expected_NT, **tolerance(peer))


def test_verl_k3_has_no_gradient_past_its_clamp():
    clamped, straight_through = row("verl vanilla + low_var_kl"), row("verl vanilla + k3+")
    batch = random_batch(on_policy=True)
    batch.ref_logp_NT = batch.logp_NT + 3.0  # k3 = e^3 - 1 - 3 > 10: far below the reference, where it matters most
    policy_NT = -batch.advantages_N[:, None] * batch.mask_NT
    torch.testing.assert_close(clamped.coefficients(batch, BETA), policy_NT)
    torch.testing.assert_close(straight_through.coefficients(batch, BETA), policy_NT - 3.0 * BETA * batch.mask_NT)


@pytest.mark.parametrize("name", ["trl grpo", "trl rloo (no KL)", "liger dapo", "verl vanilla + low_var_kl"])
def test_padding_is_ignored(name):
    peer = row(name)
    batch = random_batch()
    clean_NT = peer.coefficients(batch, BETA)
    padding_NT = ~batch.mask_NT
    batch.logits_NTV[padding_NT] *= -3.0
    for values_NT in (batch.logp_NT, batch.old_logp_NT, batch.ref_logp_NT):
        values_NT[padding_NT] *= 2.0
    torch.testing.assert_close(peer.coefficients(batch, BETA), clean_NT)
    assert (clean_NT[padding_NT] == 0).all()


def test_rows_are_labelled():
    rows, _ = found()
    for name, peer in rows.items():
        assert peer.divergence == ("none" if name.endswith("(no KL)") else "rkl")
        library, installed = peer.source.split()
        assert name.startswith(library.removesuffix("-kernel"))
        assert installed[0].isdigit()
        assert peer.note
        assert "\n" not in peer.note


def test_missing_peers_are_named_in_one_line_each(monkeypatch):
    def nothing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(module, "version", nothing)
    monkeypatch.delenv("RPG_VERL_PYTHON", raising=False)
    rows, messages = peers()
    assert rows == []
    assert [message.split()[0] for message in messages] == ["trl", "liger-kernel", "verl"]
    assert messages[0] == f"trl is not installed: {install('rpg-rl[audit]')}"
    assert "RPG_VERL_PYTHON" in messages[2]


def test_an_interpreter_without_verl_is_reported(monkeypatch, tmp_path):
    def only_missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(module, "version", only_missing)
    _, messages = peers(verl_python=str(tmp_path / "no-such-python"))
    assert messages[-1].startswith("verl cannot be used: FileNotFoundError")
    assert "\n" not in messages[-1]


def test_sources_name_the_installed_version():
    pytest.importorskip("trl")
    assert row("trl grpo").source == f"trl {version('trl')}"
