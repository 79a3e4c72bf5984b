"""The page in a real browser: from a file, without a network, with real clicks and keys."""

import json
import math

import pytest

import chromium
from make_runs import HOSTILE, make_run
from rpg import report
from rpg.report.scores import scores

pytestmark = pytest.mark.skipif(chromium.FOUND is None, reason=chromium.WHY_NOT)


@pytest.fixture(scope="module")
def browser():
    with chromium.Browser() as started:
        yield started


@pytest.fixture(scope="module")
def files(tmp_path_factory, one, many):
    folder = tmp_path_factory.mktemp("pages")
    hostile = make_run(folder / "hostile", steps=4)
    sample = {"step": 1, "prompt": HOSTILE, "response": HOSTILE, "answer": HOSTILE, "reward": 1.0}
    (hostile / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (hostile / "summary.json").write_text(json.dumps({"name": HOSTILE, "algorithm": HOSTILE}))
    rows = [{"step": i, "grad_norm": float("nan") if i == 3 else 1.0, "entropy": 2.0} for i in range(1, 6)]
    (folder / "bare").mkdir()
    (folder / "bare" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "empty").mkdir()
    (folder / "empty" / "metrics.jsonl").write_text("")
    long = make_run(folder / "long", steps=2400, every=100)
    runs = {"one": [one], "many": many}
    runs |= {name: [report.read_run(folder / name)] for name in ("hostile", "bare", "empty")} | {
        "long": [report.read_run(long)]
    }
    runs["hostile"] *= 2
    for name, those in runs.items():
        report.write(those, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in runs}


@pytest.fixture
def visit(browser, files):
    """Opens pages, and at the end holds each to what is true of all: no error, no request but itself, no overflow."""
    opened = []

    def go(name, **how):
        page = browser.open(files[name], **how)
        opened.append((page, files[name]))
        return page

    yield go
    for page, file in opened:
        page.js("new Promise((done) => requestAnimationFrame(() => done()))")
        assert page.errors == []
        assert page.requests == [file.as_uri()], "only itself"
        assert page.js("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        page.close()


def texts(page, selector):
    return page.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")


def count(page, selector):
    return page.js(f"document.querySelectorAll({json.dumps(selector)}).length")


def button(page, words, within="body"):
    """Marks the button with these words, and answers how to find it."""
    found = page.js(
        f"(() => {{ const b = [...document.querySelectorAll({json.dumps(within + ' button')})]"
        f".find((b) => [b.textContent, b.ariaLabel].includes({json.dumps(words)}));"
        "if (b) b.id = 'found'; return Boolean(b); })()"
    )
    assert found, f"no button {words!r}"
    return "#found"


@pytest.mark.parametrize("name", ["one", "many", "hostile", "bare", "empty", "long"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_every_page_opens_without_a_word(visit, name, width, dark):
    page = visit(name, width=width, dark=dark)
    assert page.js("document.body.innerText.length") > 50
    background = page.js("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 26)" if dark else "rgb(252, 252, 250)")


def test_the_curves_are_drawn_where_their_numbers_are(visit, one):
    page = visit("one")
    assert count(page, "figure.chart") == count(page, "figure.chart svg") == 13
    line = page.js("document.querySelector('#chart-accuracy .line:not(.thin)').getAttribute('d')")
    points = [tuple(map(float, p.split())) for p in line[1:].split("L")]
    values = [row["eval/arithmetic/mean@8"] for row in one.rows if "eval/arithmetic/mean@8" in row]
    assert len(points) == len(values) == 13
    (x0, y0), (x1, y1) = points[0], points[-1]
    assert [x for x, _ in points] == pytest.approx([x0 + (x1 - x0) * i / 12 for i in range(13)], abs=0.2)
    expected = [y0 + (v - values[0]) / (values[-1] - values[0]) * (y1 - y0) for v in values]
    assert [y for _, y in points] == pytest.approx(expected, abs=0.2)
    assert y1 < y0, "upwards"
    assert count(page, "#chart-accuracy .band") == 1
    assert count(page, "#chart-time .area") == 5
    assert count(page, "#chart-kl .line") == 2
    assert count(page, "#chart-length .line") == 1, "the longest is off at first"
    page.click(button(page, "longest"))
    assert count(page, "#chart-length .line") == 2


def test_one_crosshair_reads_all_charts(visit, one):
    page = visit("one")
    page.hover("#chart-entropy svg", across=0.5)
    at = set(texts(page, ".grid .readout .at"))
    assert len(at) == 1
    step = int(at.pop().removeprefix("step "))
    row = next(row for row in one.rows if row["step"] == step)
    assert texts(page, "#chart-entropy .readout b") == [f"{row['entropy']:.3g}"]
    assert texts(page, "#chart-ess .readout b") == [f"{100 * row['ess']:.1f} %"]
    assert count(page, ".cross line") == 13
    page.js("document.querySelector('#chart-entropy svg').focus()")
    page.key("ArrowRight")
    assert texts(page, "#chart-reward .readout .at") == [f"step {step + 1}"]
    page.key("Escape")
    assert texts(page, "#chart-reward .readout .at") == ["last"]
    assert count(page, ".cross line") == 0


def test_a_finger_reads_too(visit):
    page = visit("one", width=390)
    page.tap("#chart-entropy svg", across=0.6)
    assert texts(page, "#chart-kl .readout .at")[0].startswith("step ")


def test_smoothing_keeps_the_raw_curve_and_the_evaluations(visit):
    page = visit("one")
    before = page.js("document.querySelector('#chart-reward .line').getAttribute('d')")
    held_out = page.js("document.querySelector('#chart-accuracy .line:not(.thin)').getAttribute('d')")
    assert count(page, ".raw") == 0
    last = texts(page, "#chart-reward .readout b")
    page.js("{const s = document.querySelector('[type=range]'); s.value = 0.9; s.dispatchEvent(new Event('input'));}")
    assert page.js("document.querySelector('#chart-reward .line').getAttribute('d')") != before
    assert count(page, "#chart-reward .raw") == 1
    assert page.js("document.querySelector('#chart-accuracy .line:not(.thin)').getAttribute('d')") == held_out
    assert texts(page, "#chart-reward .readout b") == last, "numbers are as logged"


def test_the_axis_can_be_tokens_or_time(visit):
    page = visit("one")
    for axis, ending in (("tokens", "k"), ("time", "min")):
        page.click(button(page, axis))
        labels = texts(page, "#chart-entropy .axes text")
        assert any(label.endswith(ending) for label in labels), labels
    page.hover("#chart-entropy svg")
    assert texts(page, "#chart-entropy .readout .at")[0].split()[-1] in ("s", "min")


def test_a_logarithmic_axis_has_equal_ratios_at_equal_distances(visit):
    page = visit("one")
    page.click(button(page, "log", "#chart-grad"))
    marks = page.js(
        "[...document.querySelectorAll('#chart-grad .axes text[dy]')]"
        ".map((t) => [Number(t.textContent), Number(t.getAttribute('y'))])"
    )
    (low, bottom), (middle, between), *_, (high, top) = marks
    assert 0 < low < middle < high
    expected = bottom + (top - bottom) * math.log(middle / low) / math.log(high / low)
    assert between == pytest.approx(expected, abs=0.2)


def test_runs_are_overlaid_and_can_be_switched_off(visit):
    page = visit("many")
    assert count(page, "#chart-accuracy .line") == 4
    assert count(page, "#chart-accuracy .band") == 4
    page.click(button(page, "grpo", ".legend"))
    assert count(page, "#chart-accuracy .line") == count(page, "#chart-entropy .line") == 3
    page.click(button(page, "grpo", ".legend"))
    page.click("#toolbar [type=checkbox]")
    assert count(page, "#chart-accuracy .line") == 4 + 12
    page.click("#toolbar [type=checkbox]")
    page.click(button(page, "countdown"))
    assert "countdown" in texts(page, "#chart-accuracy [aria-pressed=true]")
    page.click(button(page, "high", "#chart-clip"))
    assert texts(page, "#chart-clip [aria-pressed=true]") == ["high"]
    assert count(page, "#chart-clip .line") == 4


def test_a_groups_line_is_the_mean_of_the_seeds_that_are_on(visit, many):
    page = visit("many")
    last = [scores(run)["arithmetic"].last for run in many if run.algorithm == "grpo"]

    def shown():
        words = next(text for text in texts(page, "#chart-accuracy .value") if text.startswith("grpo"))
        return words.split()[1]

    assert shown() == f"{100 * sum(last) / 3:.1f}"
    page.click(button(page, "grpo, seed 0"))
    assert shown() == f"{100 * sum(last[1:]) / 2:.1f}"
    page.click(button(page, "grpo, seed 1"))
    assert shown() == f"{100 * last[2]:.1f}"


def test_what_was_not_finite_is_said_under_its_chart(visit):
    page = visit("bare")
    assert texts(page, ".lost") == [" grad_norm was not a finite number at 1 step."]
    path = page.js("document.querySelector('#chart-grad .line').getAttribute('d')")
    assert path.count("M") == 2, "a gap"


# ---- responses -------------------------------------------------------------------------------------------------------


def choose(page, name, value):
    page.js(
        f"{{const s = document.querySelector('[name={name}]'); s.value = {json.dumps(value)};"
        "s.dispatchEvent(new Event('change', {bubbles: true}));}"
    )


def test_responses_are_filtered_and_searched(visit, one):
    page = visit("one")
    assert texts(page, ".count") == ["480 responses to 120 prompts"]
    choose(page, "split", "eval")
    held_out = [s for s in one.samples if s["split"] == "eval"]
    assert texts(page, ".count") == [f"{len(held_out)} responses to {len(held_out) // 4} prompts"]
    choose(page, "reward", "unsolved")
    wrong = [s for s in held_out if s["reward"] < 0.5]
    assert texts(page, ".count")[0].startswith(f"{len(wrong)} response")
    assert count(page, ".response") == 4, "the group stays together"
    assert count(page, ".response.other") == count(page, ".response .right")
    choose(page, "reward", "")
    choose(page, "step", "30")
    assert set(texts(page, ".item .where")) == {t for t in texts(page, ".item .where") if t.startswith("step 30 ")}
    choose(page, "step", "")
    choose(page, "level", "2")
    assert all(text.endswith("level 2") for text in texts(page, ".item .where"))
    choose(page, "level", "")
    choose(page, "split", "")
    page.click("[name=query]")
    page.write("ANSWER: " + one.samples[0]["answer"])
    assert texts(page, ".response mark, .prompt mark")[0].lower() == f"answer: {one.samples[0]['answer']}"
    page.write(" no such text")
    assert texts(page, ".count") == ["No response fits."]
    assert count(page, ".response") == 0


def test_a_response_is_shown_as_it_was_written(visit, one):
    page = visit("one")
    first = one.samples[0]
    assert page.js("document.querySelector('.response pre').textContent") == first["response"]
    assert page.js("getComputedStyle(document.querySelector('.response pre')).whiteSpace") == "pre-wrap"
    assert texts(page, ".prompt") == [first["prompt"]]
    facts = texts(page, ".response:nth-of-type(1) .facts span")
    sign = "+" if first["advantage"] > 0 else "−"
    assert facts[:3] == [
        f"reward {first['reward']:g}",
        f"advantage {sign}{abs(first['advantage']):g}",
        f"{first['length']} tokens",
    ]
    assert facts[3] in ("finished", "cut off")


def test_arrow_keys_turn_the_pages(visit):
    page = visit("one")
    page.click(".item")
    page.js("document.querySelector('.list').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowUp"):
        page.key(key)
    assert texts(page, ".pager span")[0] == "2 of 120"
    page.key("End")
    assert texts(page, ".pager span")[0] == "120 of 120"
    assert page.js("(() => { const l = document.querySelector('.list'); return l.scrollTop > 0; })()")
    page.click("[aria-label='Previous prompt']")
    assert texts(page, ".pager span")[0] == "119 of 120"
    assert texts(page, ".item[aria-selected=true] .where")[0].startswith("step 60")


def test_a_hostile_response_does_nothing(visit):
    page = visit("hostile")
    assert page.js("typeof window.hacked") == "undefined"
    assert texts(page, ".response pre")[0] == HOSTILE
    assert count(page, "img") == 0
    page.click("[name=query]")
    page.write("<script>")
    assert texts(page, ".response mark") == ["<script>"]
    assert page.js("typeof window.hacked") == "undefined"


# ---- people ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", "many"])
def test_on_a_phone_everything_can_be_read_and_tapped(visit, name):
    page = visit(name, width=390)
    small = page.js(
        "[...document.querySelectorAll('button, select, input:not([type=checkbox]), summary')]"
        ".map((e) => [e.outerHTML.slice(0, 80), e.getBoundingClientRect()])"
        ".filter(([, r]) => r.height < 36 || r.width < 30).map(([html, r]) => [html, r.width, r.height])"
    )
    assert small == []
    outside = page.js(
        "[...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll, .hidden-text') && "
        "e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert outside == []


PALE = """(() => {
  const rgb = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (e) => {
    const c = rgb(getComputedStyle(e).backgroundColor);
    return c.length < 4 || c[3] > 0 ? c : behind(e.parentElement);
  };
  const words = "p, h1, h2, h3, td, th, figcaption, button, label, dt, dd, .status, .facts span, .axes text";
  return [...document.querySelectorAll(words)].filter((e) => e.textContent.trim() && !e.disabled).map((e) => {
    const style = getComputedStyle(e);
    const [a, b] = [light(rgb(e.tagName === "text" ? style.fill : style.color)), light(behind(e))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.textContent.slice(0, 40)];
  }).filter(([contrast]) => contrast < 4.5);
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_words_stand_out_from_what_is_behind_them(visit, dark):
    page = visit("many", dark=dark)
    assert page.js(PALE) == []


def test_what_is_drawn_is_also_said(visit):
    page = visit("many")
    labels = page.js("[...document.querySelectorAll('figure.chart svg')].map((s) => s.getAttribute('aria-label'))")
    assert len(labels) == 13
    assert all("grpo: from " in label for label in labels)
    unnamed = page.js(
        "[...document.querySelectorAll('button, select, input')].filter((e) => !e.textContent.trim() && !e.ariaLabel "
        "&& !(e.labels && e.labels.length)).map((e) => e.outerHTML)"
    )
    assert unnamed == []


def test_it_can_be_printed(visit):
    page = visit("many")
    page.call("Emulation.setEmulatedMedia", media="print")
    hidden = page.js(
        "['.controls', '.filters', '.list'].map((s) => getComputedStyle(document.querySelector(s)).display)"
    )
    assert hidden == ["none"] * 3
    page.call("Page.printToPDF")


def test_without_a_script_the_tables_are_there(visit, browser, files, many):
    text = files["many"].read_text()
    assert "<noscript>" in text
    before_script = text[: text.index('<script type="application/json"')]
    assert all(run.name in before_script for run in many)
