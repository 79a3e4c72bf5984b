"""The site in a real browser, without a network: opened from its folder, and served."""

import http.server
import threading
import time
from functools import partial

import pytest

from chromium import FOUND, WHY_NOT, Browser

pytestmark = pytest.mark.skipif(not FOUND, reason=WHY_NOT)
DIALOG = "[...document.querySelectorAll('*')].find((e) => e.shadowRoot).shadowRoot"


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


def at_ease(page, home):
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith((home, "data:"))] == []
    assert page.js("document.documentElement.scrollWidth <= innerWidth")


def arrives(page, there):
    """Wait for a page that another one leads to; in between there is none to ask."""
    until = time.monotonic() + 20
    while True:
        try:
            if page.js(there):
                return
        except RuntimeError:
            pass
        assert time.monotonic() < until, f"never true: {there}"
        time.sleep(0.05)


def follow(page, link, there):
    page.js(f"document.querySelector({link!r}).click()")
    arrives(page, there)


def search(page, words):
    """What the search lists, best first."""
    page.wait(f"{DIALOG}.querySelector('dialog')")
    page.click(".md-search__button")
    page.wait(f"{DIALOG}.querySelector('dialog').open && {DIALOG}.activeElement?.tagName === 'INPUT'")
    for letter in words:
        page.call("Input.dispatchKeyEvent", type="keyDown", key=letter, text=letter)
        page.call("Input.dispatchKeyEvent", type="keyUp", key=letter)
    page.wait(f"{DIALOG}.querySelector('[role=listbox]').textContent.includes({words!r})")
    assert page.js(f"{DIALOG}.querySelector('input').value") == words
    return page.js(f"[...{DIALOG}.querySelectorAll('[role=listbox] a')].map((e) => e.href)")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_pages_are_drawn(browser, site, width, dark):
    for name in ("index", "losses", "api/loss", "source/examples/one_page.py"):
        page = browser.open(site / f"{name}.html", width=width, dark=dark)
        at_ease(page, site.as_uri())
        assert page.js("document.querySelector('article h1').getBoundingClientRect().height") > 20
        light = page.js("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
        assert light < 60 if dark else light > 240
        page.close()
    page = browser.open(site / "index.html", width=width, dark=dark)
    assert page.js("[...document.querySelectorAll('article img')].every((i) => i.complete && i.naturalWidth > 0)")


def test_search_from_the_folder(browser, site):
    page = browser.open(site / "training.html")
    found = search(page, "RPGClip")
    assert found[0].partition("?")[0] == (site / "api" / "clip.html").as_uri()
    page.key("Enter")
    arrives(page, "document.querySelector('article h1')?.textContent.includes('Clips')")
    at_ease(page, site.as_uri())


def test_search_where_it_is_served(browser, site):
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        page = browser.open(site / "index.html")
        page.call(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        page.requests.clear()
        page.call("Page.navigate", url=home)
        arrives(page, f"location.href === {home!r} && document.readyState === 'complete'")
        assert any("audit" in url for url in search(page, "off-policy"))
        at_ease(page, home)
        page.close()
        server.shutdown()


def test_the_explorer_draws_its_curves(browser, site):
    page = browser.open(site / "index.html")
    curves = "[...document.querySelectorAll('svg path.line')].filter((line) => line.getTotalLength() > 200).length >= 4"
    follow(page, 'nav a[href$="live/explorer.html"]', curves)
    at_ease(page, site.as_uri())
    follow(page, 'a[href="../index.html"]', "document.querySelector('article h1')?.textContent.includes('rpg')")
