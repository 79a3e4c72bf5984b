"""The explorer in a real browser: a thousand settings against the library, and the page as a reader uses it."""

import json
import random
from pathlib import Path

import pytest
import random_settings as settings
import torch

from chromium import FOUND, WHY_NOT, Browser
from rpg import algorithm
from rpg.explorer import sample, source, words

pytestmark = pytest.mark.skipif(not FOUND, reason=WHY_NOT)
PAGE = Path(__file__).parents[2] / "docs" / "explorer.html"
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


def opened(browser, address="", **how):
    page = browser.open(PAGE, **how)
    if address:
        page.js(f"location.hash = {address!r}")
        page.wait(f"explorer.address === {address!r}")
    return page


def at_ease(page):
    """No error, nothing loaded from anywhere, nothing wider than the window."""
    assert page.errors == []
    assert page.requests == [PAGE.as_uri()]
    assert page.js("document.documentElement.scrollWidth <= innerWidth")


def test_a_thousand_settings_are_the_librarys(browser):
    page, drawn = opened(browser), settings.thousand()
    out = page.js(f"{json.dumps(drawn)}.map((s) => explorer.at(...s))")
    texts, formulas = source.expressions(), source.formulas()
    for (state, log_w, advantage), (c, said, code, formula) in zip(drawn, out, strict=True):
        meant = settings.coefficient(state, log_w, advantage)
        assert abs(c - meant) <= TOLERANCE * max(1, abs(meant)), (state, log_w, advantage)
        loss = settings.library(state)
        logp, _, _ = settings.tensors(state, log_w)
        x = sample.sample(logp, log_w, state["log_v"], advantage)
        assert said == sample.sentence(loss, x, meant), state  # its words are those of Python too
        assert (code, formula) == (words.code(loss, texts), words.formula(loss, formulas)), state


def test_every_presets_curves_are_the_librarys(browser):
    page = opened(browser)
    presets = page.js("Object.keys(explorer.presets)")
    assert len(presets) > 35
    for name in presets:
        page.js(f"explorer.choose({name!r})")
        state = page.js("explorer.presets")[name]["state"]
        state |= {"advantage": 1.0, "log_v": 0.0, "p": 0.3}
        loss = settings.library(state).replace(reduction="none", constant=None)
        if ":" not in name and name != "dual clip":
            assert loss == algorithm(name).loss.replace(reduction="none", constant=None, needs=())
        for advantage, points in page.js("explorer.curves()"):
            log_w, drawn = torch.tensor(points, dtype=torch.float64).unbind(-1)
            logp, old, ref = (x.mT.contiguous() for x in settings.tensors(state, log_w))
            logp = logp.detach().requires_grad_()
            mask = torch.ones_like(logp, dtype=torch.bool)
            advantages = torch.full(log_w.shape, advantage, dtype=torch.float64)
            out = loss(logp, old.expand_as(logp), advantages, mask, ref_logp=ref.expand_as(logp))
            (c,) = torch.autograd.grad(out.loss.sum(), logp)
            torch.testing.assert_close(drawn, c[:, 0], rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m: f"{name}: {m}")
    assert page.errors == []


def test_what_is_read_at_a_ratio(browser):
    page = opened(browser, "preset=ppo&w=1.6")
    said = "document.querySelector('#{} .said').firstChild.textContent"
    assert page.js(said.format("positive")) == "w = 1.6, A > 0: the clip cuts it: no gradient."
    assert page.js(said.format("negative")) == "w = 1.6, A < 0: it counts 1.6 times: the token is made less likely."
    page.js("document.querySelector('#positive [data-plot=omega] svg').focus()")
    for _ in range(40):
        page.key("ArrowLeft")
    ratio = page.js("explorer.state.w")
    assert ratio < 1.2
    assert (
        page.js(said.format("positive"))
        == f"w = {ratio:.3g}, A > 0: it counts {ratio:.3g} times: the token is made more likely."
    )
    page.hover("#negative [data-plot=weight] svg", across=0.2)
    assert page.js(said.format("negative")).endswith("A < 0: the clip cuts it: no gradient.")
    assert page.js("document.querySelectorAll('#negative rect.cut').length") == 2  # in both of its panels
    at_ease(page)


SET = """(name, value) => { const field = document.querySelector(`[name="${name}"]`); field.value = value;
field.dispatchEvent(new Event("input", { bubbles: true })); }"""


def put(page, name, value):
    """Into a field."""
    page.js(f"({SET})({name!r}, {value!r})")


def text(page, selector):
    return page.js(f"document.querySelector({selector!r}).textContent")


def test_buttons_fields_and_the_address(browser):
    page = opened(browser)
    page.click("[data-preset=cispo]")
    assert page.js("location.hash") == "#preset=cispo"
    assert "w_bar = w.clamp(max=5)" in text(page, "#code")
    assert page.js("document.querySelectorAll('#positive rect.held').length") == 2
    put(page, "o.high", 1)
    assert "w.clamp(max=2)" in text(page, "#code")
    assert page.js("location.hash") == "#preset=cispo&o.high=1"
    put(page, "estimator", "differentiable")  # this clip has no such form
    assert "stops the ratio's gradient; use estimator='reinforce'" in text(page, "#trouble")
    assert page.js("explorer.state.estimator") == "reinforce"
    put(page, "divergence", "k3")
    assert page.js("document.querySelectorAll('#audit td.off').length") > 3
    kept = page.js("location.hash"), text(page, "#code")
    again = opened(browser, kept[0].removeprefix("#"))
    assert (again.js("location.hash"), text(again, "#code")) == kept
    for nonsense in ("preset=gone", "clip=constructor&beta=x&o.low=7", "preset=ppo&o.low=9", "w=-1&zoom=0"):
        astray = opened(browser, nonsense)
        assert astray.js("document.querySelectorAll('.plot svg').length") == 4
        at_ease(astray)
    at_ease(page)
    at_ease(again)


@pytest.mark.parametrize("how", [{"width": 390}, {"width": 820, "dark": True}])
def test_on_a_phone_and_in_the_dark(browser, how):
    page = opened(browser, "preset=rpg-reinforce-urkl&beta=0.5&w=3", **how)
    before = page.js("explorer.state.w")
    page.tap("#positive [data-plot=omega] svg", across=0.3)
    assert page.js("explorer.state.w") != before
    targets = "[...document.querySelectorAll('button, select, summary')].filter((e) => e.offsetParent)"
    assert page.js(f"{targets}.every((e) => e.offsetHeight >= 32)")
    at_ease(page)


def test_random_states_draw_without_trouble(browser):
    page, rng = opened(browser), random.Random(3)
    names = ("divergence", "beta", "estimator", "level", "clip", "kl_in_clip", "through_advantage", "advantage", "p")
    for state, _, _ in settings.thousand(seed=4, n=40):
        parts = {n: state[n] for n in names} | {f"o.{n}": v for n, v in state["options"].items()}
        parts = {
            n: {True: "true", False: "false", None: "null"}.get(v, v) if not isinstance(v, float) else v
            for n, v in parts.items()
        }
        address = "&".join(f"{name}={value}" for name, value in parts.items()) + f"&w={rng.uniform(0.3, 3):.3f}"
        page.js(f"location.hash = {address!r}")
        page.wait(f"explorer.address === {address!r}")
        assert page.js("document.querySelector('#trouble').textContent") == "", address
        assert page.js("explorer.state.clip") == state["clip"]
    at_ease(page)
