"""The page and the picture: well-formed, self-contained, readable, and with the audit's own numbers in them."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from rpg import PolicyLoss, audit
from rpg.audit import SCENARIOS, page, picture
from rpg.audit.summary import (
    ON_POLICY,
    REF_IS_OLD,
    THREE_POLICIES,
    AuditReport,
    Line,
    bias_text,
    grade,
    is_right,
    joined_labels,
    merge,
    span,
    worst,
)
from rpg.audit.table import variance_text
from rpg.console import percent_two_digits, two_digits

VOID = {"meta", "col", "br", "img", "link", "input", "hr"}


def subjects():
    own = [
        replace(audit.resolve(name), source="rpg 0.1.0")
        for name in ("rpg-urkl", "rpg-fkl", "ppo", "grpo", "grpo-corrected", "gspo", "rloo")
    ]
    grpo, exact = audit.resolve("grpo"), audit.resolve(PolicyLoss("rkl", 0.1))
    names = ("grpo", "dapo", "bnpo", "cispo", "dr_grpo", "sapo")
    peers = [replace(grpo, name=f"verl {name} + low_var_kl", source="verl 0.9.1", note="k3 & <k>") for name in names]
    peers += [replace(exact, name="liger dapo", source="liger-kernel 0.8.5", dtype=torch.float32)]
    return [*own, *peers, replace(grpo, name="/tmp/<b>&.py:loss", source="user")]


def test_the_picture_has_the_colours_of_the_page():
    css = Path(page.__file__).with_name("page.css").read_text(encoding="utf-8")
    assert (
        dict(re.findall(r"--(exact|rounding|small|medium|large): (#\w+);", css.partition("@media")[0]))
        == picture.COLOURS
    )


@pytest.fixture(scope="module")
def report():
    chosen = subjects()
    return AuditReport.of(audit.run(chosen, seeds=2, messages=["verl is <away>"]), chosen, "rpg audit --peers")


@pytest.fixture(scope="module")
def text(report):
    return page.html(report)


class Reader(HTMLParser):
    """Checks that tags balance, and collects the cells of each table's rows with the machine-readable values."""

    def __init__(self):
        super().__init__()
        self.open, self.rows, self.attributes, self.words = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *a) for a in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.table = dict(attrs).get("class")
        if tag == "tr":
            self.rows.append({"table": self.table, "title": "", "values": [], "labels": []})
        if tag == "data":
            self.rows[-1]["values"].append(float(dict(attrs)["value"]))
        if tag == "svg" and "aria-label" in dict(attrs):
            self.rows[-1]["labels"].append(dict(attrs)["aria-label"])

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *a) for a in attrs]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> without a beginning"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)
        if self.open and self.open[-1] == "th" and self.rows:
            self.rows[-1]["title"] += data


@pytest.fixture(scope="module")
def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


def test_tags_balance_and_nothing_unescaped_gets_in(read, text):
    assert read.open == []
    assert "&lt;b&gt;&amp;.py:loss" in text
    assert "<b>&.py" not in text
    assert "verl is &lt;away&gt;" in text


def test_nothing_is_loaded_from_anywhere(read, text):
    assert "http://" not in text
    assert "https://" not in text
    assert not re.search(r"<(script|link|img|iframe|object|embed)\b|@import|url\(", text)
    assert not [a for a in read.attributes if a[1] in ("src", "href", "srcset") or a[1].startswith("on")]


def test_it_is_small_and_made_for_phones_and_for_the_dark(text):
    assert len(text.encode()) < 300_000
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert re.search(r"@media \(max-width: \d+px\)", text)
    assert text.startswith('<!doctype html>\n<html lang="en">')


def test_the_numbers_of_the_table_are_those_of_the_json(read, report):
    found = json.loads(json.dumps(report.as_dict()))
    rows = [row for row in read.rows if row["table"] == "heat" and row["values"]]
    assert len(rows) == len(found["subjects"])
    for shown, subject in zip(rows, found["subjects"], strict=True):
        own = [r for r in found["rows"] if r["name"] == subject["name"] and r["own"]]
        biases = [
            next(r["bias"] for r in own if (r["scenario"], r["lengths"]) == (scenario, lengths))
            for lengths in ("fixed", "variable")
            for scenario in SCENARIOS
        ]
        kl = next(r["kl_bias"] for r in own if (r["scenario"], r["lengths"]) == (THREE_POLICIES, "fixed"))
        box = next(r for r in found["box"] if (r["name"], r["scenario"]) == (subject["name"], THREE_POLICIES))
        cut = [
            r["bias"] for r in found["truncated"] if (r["name"], r["top_p"]) == (subject["name"], 0.9) and r["usual"]
        ]
        assert shown["values"] == biases + ([] if kl is None else [kl]) + [max(box["bias"], box["apart"] or 0.0), *cut]


def test_the_numbers_of_the_details_are_those_of_the_json(read, report):
    rows = [row for row in read.rows if row["table"] == "details" and row["values"]]
    assert len(rows) == len(report.lines)
    for shown, line in zip(rows, report.lines, strict=True):
        own, sequence = line.row(THREE_POLICIES), line.row(THREE_POLICIES, objective="sequence")
        noise, engine = line.in_box(REF_IS_OLD).kl_variance, line.truncated_bias(feed="engine")
        expected = (sequence.bias, own.cosine, own.variance, own.cut, own.left, own.clipped_bias, noise, engine)
        assert shown["values"] == [v for v in expected if v is not None]


def test_the_plots_print_the_numbers_they_show(read, report):
    plotted = [(row["title"], row["labels"]) for row in read.rows if row["labels"]]
    peer = next(line for line in report.lines if line.name.startswith("verl grpo"))
    alike = "grpo · dapo · bnpo · cispo · dr_grpo · sapo, each + low_var_kl"
    assert (alike, [bias_text(peer.kl_bias(s)) for s in SCENARIOS]) in plotted
    assert not is_right(peer.kl_bias(ON_POLICY))
    for lengths in ("fixed", "variable"):
        assert ("urkl", [two_digits(report.lines[0].row(s, lengths).kl_variance) for s in SCENARIOS]) in plotted
    corrected = next(line for line in report.lines if line.name == "grpo-corrected")
    assert ("grpo-corrected", [f"exact, then {bias_text(corrected.bias(ON_POLICY, 'variable'))}"]) in plotted


def test_the_plot_of_truncated_sampling_shows_what_each_trainer_feeds(read, report):
    plotted = {row["title"]: row["labels"] for row in read.rows if row["labels"]}
    assert ["exact"] * 3 in [labels for title, labels in plotted.items() if "rpg-urkl" in title]
    grpo = next(line for line in report.lines if line.name == "grpo")
    assert [bias_text(grpo.truncated_bias(top_p)) for top_p in (0.95, 0.9, 0.7)] in plotted.values()
    assert "given current, old and ref over the tokens that the sampler could draw" in " ".join(read.words)


def test_dots_stand_where_their_numbers_are(text):
    label = re.compile(r'aria-label="([\d.]+) %">.*?<circle class="(\w+)" cx="([\d.]+)%"')
    kl = text[text.index('id="kl"') : text.index('id="lengths"')]
    dots = [(float(number) / 100, kind, float(cx)) for number, kind, cx in label.findall(kl)]
    assert len(dots) >= 6
    for bias, kind, cx in dots:
        assert kind == grade(bias)
        assert cx == pytest.approx(3 + 94 * (math.log10(bias) + 16) / 17, abs=0.2)


def test_headline_and_cards_are_counted_not_written(report, read):
    total, wrong = len(report.lines), sum(line.right_where != "everywhere" for line in report.lines)
    assert f"{total - wrong} of {total} policy-gradient losses have the exact gradient" in read.words
    assert 0 < wrong < total
    right = [line.subject for line in report.lines if line.right_where == "everywhere"]
    every = replace(report, subjects=right)
    assert page.headline(every) == f"All {len(right)} losses have the exact gradient"
    alone = replace(report, subjects=right[:1])
    assert page.headline(alone) == "rpg-urkl has the exact gradient in all six settings"
    words = " ".join(read.words)
    assert "Liger 0.8.5 (float32)" in words
    ours = report.libraries[0]
    assert (len(ours.right_off_policy), len(ours.with_kl)) == (3, 4), "all but grpo"
    assert "3 of 4 with a KL are right off-policy" in words
    assert ">3 of 4 right<" in picture.svg(report)
    for fact in ("rpg audit --peers", "liger-kernel 0.8.5", "2 (0 to 1)", report.date, "verl is <away>"):
        assert fact in words


def test_an_audit_of_one_loss_without_a_kl_term_is_a_page_too(report):
    ppo = replace(report, subjects=[s for s in report.subjects if s.name == "ppo"])
    reader = Reader()
    reader.feed(page.html(ppo))
    assert reader.open == []
    assert 'id="kl"' not in page.html(ppo)
    assert "no audited loss has a KL term" in picture.svg(ppo)


# ---- the picture -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(report):
    return ElementTree.fromstring(picture.svg(report))


def named(root, name):
    return list(root.iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def test_every_kl_loss_is_a_dot_at_its_bias(drawn, report):
    low, high = picture.place(picture.LOWEST), picture.place(picture.HIGHEST)
    dots = {dot[0].text.rsplit(": ", 1)[0]: dot for dot in named(drawn, "circle")}
    assert set(dots) == {line.name for line in report.lines if line.has_kl}
    for line in report.lines:
        if line.has_kl:
            x = float(dots[line.name].get("cx"))
            bias = 10 ** (-16 + 17 * (x - low) / (high - low))
            assert math.log10(bias) == pytest.approx(math.log10(max(line.bias(THREE_POLICIES), 1e-16)), abs=0.01)


def test_dots_do_not_touch_and_stay_in_their_lanes(drawn, report):
    dots = [(float(d.get("cx")), float(d.get("cy")), float(d.get("r"))) for d in named(drawn, "circle")]
    for i, (x, y, r) in enumerate(dots):
        lane = (y - picture.TOP) / picture.LANE
        assert r / picture.LANE < lane % 1 < 1 - r / picture.LANE
        assert all(math.hypot(x - a, y - b) > r + c - 0.15 for a, b, c in dots[:i])


def test_no_text_covers_another_or_leaves_the_card(drawn):
    boxes = []
    for label in named(drawn, "text"):
        x, y, height = (float(label.get(k)) for k in ("x", "y", "font-size"))
        width = 0.54 * height * len(label.text)
        left = x - {"start": 0, "middle": width / 2, "end": width}[label.get("text-anchor")]
        boxes.append((left, y - 0.75 * height, left + width, y + 0.2 * height, label.text))
    for i, (a, b, c, d, words) in enumerate(boxes):
        assert a >= 10, words
        assert c <= picture.WIDTH - 10, words
        for e, f, g, h, others in boxes[:i]:
            assert c <= e or g <= a or d <= f or h <= b, (words, others)


def test_the_picture_needs_nothing_but_itself(report):
    text = picture.svg(report)
    assert text.count("http") == 1, "the namespace alone"
    assert "<style" not in text
    assert f'width="{picture.WIDTH}"' in text
    assert len(text) < 40_000


def test_long_lists_of_names_are_cut_with_their_number():
    names = " · ".join(f"a-long-name-{i}" for i in range(40))
    rows = picture.wrap(names, 400, 2)
    assert len(rows) == 2
    shown = sum(row.count("a-long-name") for row in rows)
    assert rows[-1].endswith(f" · {40 - shown} more")
    assert picture.wrap("one · two; three · four", 400, 2) == ["one · two; three · four"]
    assert picture.wrap("one · two; three · four", 80, 2) == ["one · two;", "three · four"]
    assert picture.wrap("", 400, 2) == []


# ---- numbers in words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bias", "words", "kind"),
    [
        (None, "–", "absent"),
        (0.0, "exact", "exact"),
        (9e-11, "exact", "exact"),
        (8.3e-8, "8e-08", "rounding"),
        (2.2e-4, "0.022 %", "small"),
        (0.0666, "6.7 %", "small"),
        (0.231, "23 %", "medium"),
        (1.232, "123 %", "large"),
        (math.nan, "nan", "large"),
    ],
)
def test_a_bias_in_words_and_in_colour(bias, words, kind):
    assert bias_text(bias) == words
    assert grade(bias) == kind
    assert is_right(bias) == (kind in ("exact", "rounding"))


def test_other_numbers_in_words():
    shares = [percent_two_digits(x) for x in (None, 0.0, 0.163, 0.0064)]
    assert shares == ["–", "0 %", "16 %", "0.64 %"]
    assert (two_digits(36.92), two_digits(4.56), two_digits(0.0)) == ("37", "4.6", "0")
    assert span([0.59, 1.23]) == "59–123 %"
    assert span([0.231, 0.2311]) == "23 %"
    assert math.isnan(worst([0.1, math.nan, 2.0]))
    assert [variance_text(x) for x in (None, 4.56, 10868.2, 5.7e9)] == ["–", "4.6", "10,868", "5.7e9"]
    assert bias_text(2.36e14) == "2.4e16 %"


def line_with(biases, name="loss", objective="token"):
    """A line whose biases are given as {(scenario, lengths): bias}, 0 elsewhere."""
    subject = replace(audit.resolve("rpg-rkl"), name=name, source="rpg 0.1.0", objective=objective)
    template = audit.check("rpg-rkl", seeds=1).select(own=True)
    return Line(subject, tuple(replace(r, bias=biases.get((r.scenario, r.lengths), 0.0)) for r in template))


def test_where_a_loss_is_right():
    everything = {(s, n): 0.3 for s in SCENARIOS for n in ("fixed", "variable")}
    variable = {k: v for k, v in everything.items() if k[1] == "variable"}
    off_policy = {k: v for k, v in everything.items() if k[0] != ON_POLICY}
    expected = {
        "everywhere": {},
        "fixed lengths": variable,
        "on-policy": off_policy,
        "on-pol., fixed": variable | off_policy,
        "in part": {k: v for k, v in everything.items() if k != (THREE_POLICIES, "variable")},
        "nowhere": everything,
    }
    assert {where: line_with(biases).right_where for where, biases in expected.items()} == {w: w for w in expected}
    assert line_with({(ON_POLICY, "fixed"): math.nan}).right_where == "in part"


def test_a_seed_that_is_off_is_not_hidden_by_the_median():
    line = line_with({})
    off = replace(line, rows=(replace(line.rows[0], worst_bias=0.089), *line.rows[1:]))
    assert (line.right_where, off.right_where) == ("everywhere", "not all seeds")
    assert {place: bias for place, bias in off.hidden.items() if bias > 1e-6} == {"on-policy at fixed lengths": 0.089}


def test_losses_that_look_alike_share_a_row():
    names = ("verl a + k3", "verl b + k3", "verl c (no KL)", "verl d")
    plain = line_with({})
    lines = [replace(plain, subject=replace(plain.subject, name=name, source="verl 1")) for name in names]
    assert joined_labels(lines) == "a · b, each + k3; c (no KL); d"
    far = line_with({(ON_POLICY, "fixed"): 0.5}, name="other")
    merged = merge([*lines, far], lambda line: (line.bias(ON_POLICY),))
    assert [label for label, _ in merged] == ["a · b, each + k3; c (no KL); d", "other"]
