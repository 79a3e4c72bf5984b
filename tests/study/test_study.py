"""A whole study in real runs, one method made to diverge; then its page in a real browser."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser

import pytest

import chromium

TEXT = """
compare:
  dapo:
  diverges: {algorithm: dapo, optim.lr: 1.0e+30, optim.warmup: 0, optim.schedule: constant}
seeds: 2
budget: {steps: 2}
target: 0.2
jobs: 2
set:
  device: cpu
  rollout: {prompts: 4, samples: 4, max_new_tokens: 24, dynamic: false}
  eval: {problems: 8, k: 2, every: 1}
"""
EMPTY = ("br", "circle", "line", "link", "meta", "polygon")


@pytest.fixture(scope="module")
def done(server, tmp_path_factory):
    """The folder of a study, and what was printed."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "small.yaml").write_text(TEXT)
    job = server.start("study", folder / "small.yaml", "-o", folder / "out").wait()
    assert job.code == 0, job.text
    return folder / "out", job.out


def test_what_diverged_is_in_the_tables_with_its_reason(done):
    folder, said = done
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()][1:]
    assert {row["run"]: row["status"] for row in rows} == {
        f"runs/{arm}/seed-{i}": status for arm, status in (("dapo", "finished"), ("diverges", "failed")) for i in (0, 1)
    }
    assert "diverges, seed 0: failed at step" in said
    assert "| diverges " in said
    assert not list(folder.glob("runs/*/*/checkpoints")), "which take the most room"


def test_results_alone_make_the_same_tables_and_page(done, command, tmp_path):
    folder, said = done
    shutil.copy(folder / "results.jsonl", tmp_path)
    for given in (tmp_path, tmp_path / "results.jsonl"):
        job = command("study", given)
        assert (job.code, job.out) == (0, said)
        assert (tmp_path / "study.html").read_bytes() == (folder / "study.html").read_bytes()
    result = json.loads(command("study", tmp_path, "--json").out)
    assert [arm["failed"] for arm in result["arms"]] == [0, 2]


class Tags(HTMLParser):
    """That every element is closed where it should be, and what stands in which."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.lines = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        self.lines += dict(attrs).get("class", "").startswith("line c")
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag


def test_the_page_is_whole(done):
    text = (done[0] / "study.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.ids == ["curves", "arms", "differences", "failed"]
    assert tags.lines == 2, "a curve for each method"
    assert text.index("difference") < text.index("<svg"), "the verdict in words comes first"
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.skipif(chromium.FOUND is None, reason=chromium.WHY_NOT)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_in_a_browser(done, width, dark):
    file = done[0] / "study.html"
    with chromium.Browser() as browser:
        page = browser.open(file, width=width, dark=dark)
        page.js("new Promise((drawn) => requestAnimationFrame(() => drawn()))")
        assert page.errors == []
        assert page.requests == [file.as_uri()], "only itself"
        assert page.js("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        assert page.js(
            "[...document.querySelectorAll('.panel svg')].every((e) => e.getBoundingClientRect().width > 200)"
        )
        assert page.js("getComputedStyle(document.querySelector('.line')).stroke") != "none"
        assert page.js("document.querySelectorAll('#differences .bar svg').length") == 1
