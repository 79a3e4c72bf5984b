"""A real browser for tests: headless Chromium over its debugging pipe, with nothing installed for it.

with Browser() as browser:
    page = browser.open(path, width=390)
    page.click("#button")
    assert page.js("document.title") == "…"
    assert page.errors == []
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)
WHY_NOT = f"no browser: none of {', '.join(NAMES)} is installed"
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --disable-extensions --mute-audio --hide-scrollbars
    --remote-debugging-pipe"""
# the browser reads commands from descriptor 3 and answers on 4
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    def __init__(self, timeout=20.0):
        assert FOUND, WHY_NOT
        self.timeout, self.last_id, self.unread, self.pages = timeout, 0, b"", {}
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self.write_end = os.pipe()
        self.read_end, answers = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (commands, answers)]  # clear of 3 and 4
        line = [FOUND, *FLAGS.split(), f"--user-data-dir={self.folder.name}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, high), *line],
            pass_fds=high,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands, answers, *high):
            os.close(end)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.write_end)
        os.close(self.read_end)
        self.folder.cleanup()

    def call(self, method, session=None, **params):
        """One command; events that arrive meanwhile go to their pages."""
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.write_end, data) :]
        until = time.monotonic() + self.timeout
        while True:
            answer = self._read(until, method)
            if answer.get("id") == self.last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if "method" in answer and answer.get("sessionId") in self.pages:
                self.pages[answer["sessionId"]].event(answer["method"], answer["params"])

    def _read(self, until, waiting_for):
        while b"\0" not in self.unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.read_end], [], [], left)[0]:
                raise TimeoutError(f"no answer to {waiting_for} in {self.timeout} s")
            chunk = os.read(self.read_end, 1 << 20)
            if not chunk:
                raise ConnectionError(f"the browser is gone (exit code {self.process.poll()})")
            self.unread += chunk
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def open(self, path, width=1280, height=900, dark=False):
        """A file in a new tab, without a network; a narrow one is a phone."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        page.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        page.size(width, height)
        page.call("Page.navigate", url=Path(path).resolve().as_uri())
        page.wait("document.readyState === 'complete' && location.protocol === 'file:'")
        return page


class Page:
    def __init__(self, browser, session, target):
        self.browser, self.session, self.target = browser, session, target
        self.errors, self.requests = [], []

    def event(self, method, params):
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def js(self, expression):
        """Value of an expression, promises awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description"))
        return result["result"].get("value")

    def wait(self, expression, seconds=10.0):
        until = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.02)

    def size(self, width, height=900):
        phone = width < 700
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def point(self, selector, across=0.5, down=0.5):
        """Scrolled into view, the place inside an element in the window's coordinates."""
        name = json.dumps(selector)
        found = self.js(
            f"(() => {{ const e = document.querySelector({name}); if (!e) return null;"
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); const r = e.getBoundingClientRect();"
            "return [r.left, r.top, r.width, r.height]; })()"
        )
        assert found, f"no element {selector}"
        left, top, width, height = found
        return left + across * width, top + down * height

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def hover(self, selector, across=0.5, down=0.5):
        self.mouse("mouseMoved", *self.point(selector, across, down))

    def click(self, selector, across=0.5, down=0.5):
        x, y = self.point(selector, across, down)
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def tap(self, selector, across=0.5, down=0.5):
        x, y = self.point(selector, across, down)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def key(self, name):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def write(self, text):
        self.call("Input.insertText", text=text)

    def screenshot(self, path, full=False):
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
        Path(path).write_bytes(base64.b64decode(image))

    def close(self):
        self.browser.call("Target.closeTarget", targetId=self.target)
