"""The explorer: what it draws is what the library computes, and the page in docs/ is the one that the code builds."""

import sys
from pathlib import Path

import pytest
import random_settings as settings
import torch

from rpg.explorer import javascript, numbers, page, sample, source, words
from rpg.loss import clip

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explorer.html"
MAKE = "run: rpg algorithms --html docs/explorer.html"


def test_the_page_in_the_docs_is_the_one_that_the_code_builds():
    committed = PAGE.read_text(encoding="utf-8")
    assert committed == page.html(page.numbers_of(committed)), MAKE


def test_its_numbers_are_the_audits():
    shown, made = page.numbers_of(PAGE.read_text(encoding="utf-8")), numbers.problems()
    assert shown.keys() == numbers.losses().keys(), MAKE
    for key in ("w urkl token", "w k3 token /|y|", "Unweighted fkl sequence", "through rkl sequence-mean"):
        assert shown[key] == numbers.cells(numbers.losses()[key], made), MAKE
    assert shown["w urkl token"][2][3] == "exact"
    assert shown["w k3 token"][2][3].endswith("%")


def test_one_sample_is_what_the_library_makes_of_it():
    for state, log_w, advantage in settings.thousand(seed=1, n=200):
        loss = settings.library(state)
        logp, _, _ = settings.tensors(state, log_w)
        out = sample.loss_of(loss, sample.sample(logp, log_w, state["log_v"], advantage))
        (c,) = torch.autograd.grad(out.sum(), logp)
        assert float(c) == pytest.approx(settings.coefficient(state, log_w, advantage), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"])
def test_the_plain_code_has_the_gradient_of_the_loss(reduction):
    """Three responses of one to four tokens."""
    rng = torch.Generator().manual_seed(0)
    for state, _, _ in settings.thousand(seed=2, n=150):
        constant = 7 if reduction == "constant" else None
        loss = settings.library(state).replace(reduction=reduction, constant=constant)
        mask = torch.arange(4) < torch.tensor([[4], [2], [1]])
        old = -0.5 - 2 * torch.rand(3, 4, generator=rng, dtype=torch.float64)
        ref = old + state["log_v"] * torch.rand(3, 4, generator=rng, dtype=torch.float64)
        new = (old + torch.rand(3, 4, generator=rng, dtype=torch.float64) - 0.6).requires_grad_()
        advantages = torch.randn(3, generator=rng, dtype=torch.float64)
        (meant,) = torch.autograd.grad(loss(new, old, advantages, mask, ref_logp=ref).loss, new)
        known = {"logp": new, "old": old, "ref": ref, "mask": mask.double(), "torch": torch}
        known["A"] = advantages[:, None] if state["level"] == "token" else advantages
        text = words.code(loss, source.expressions())
        exec(text, known)
        (plain,) = torch.autograd.grad(known["loss"], new)
        torch.testing.assert_close(plain, meant, rtol=1e-7, atol=1e-9, msg=lambda m: f"{m}\n{state}\n{text}")


def test_what_has_no_javascript_is_refused():
    with pytest.raises(javascript.Untranslatable, match="no gone"):
        javascript.translate(clip, "gone")
    with pytest.raises(javascript.Untranslatable, match="With"):
        javascript.translate(sys.modules[__name__], "test_what_has_no_javascript_is_refused")
