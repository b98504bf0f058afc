# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""A headless Chromium for tests, spoken to over two pipes (`--remote-debugging-pipe`): no driver, port or package."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = "no Chromium here, and this test is about what it shows: apt-get install chromium (or put chrome on PATH)"


def find_chromium():
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, MISSING
    return found


class Browser:
    """One browser with one page. `requests` and `errors` collect what the page asked for and complained about."""

    def __init__(self):
        self.home = tempfile.TemporaryDirectory(prefix="mla-chromium-", ignore_cleanup_errors=True)
        there, self.output = os.pipe()
        self.input, back = os.pipe()
        command = [
            find_chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--disable-background-networking", "--no-first-run", "--remote-debugging-pipe",
            f"--user-data-dir={self.home.name}",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{there} 4>&{back}', *command],
            pass_fds=(there, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(there)
        os.close(back)
        self._ids, self._rest, self._events = itertools.count(1), b"", []
        self.requests, self.errors, self.session = [], [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.output)
        os.close(self.input)
        self.home.cleanup()

    def call(self, method, **params):
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params} | (
            {"sessionId": self.session} if self.session else {}
        )
        os.write(self.output, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(60)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._take(answer)

    def _read(self, timeout):
        deadline = time.monotonic() + timeout
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self.input], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"Chromium did not answer in {timeout} s"
            data = os.read(self.input, 1 << 20)
            assert data, "Chromium ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _take(self, event):
        method, params = event.get("method"), event.get("params", {})
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str([argument.get("value") for argument in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])

    def viewport(self, width, height=900, dark=False, printed=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="print" if printed else "", features=[scheme])

    def open(self, place):
        """Open a file or URL and wait until it has loaded; `requests` and `errors` start afresh."""
        url = place.resolve().as_uri() if isinstance(place, Path) else place
        self.requests, self.errors, self._events = [], [], []
        result = self.call("Page.navigate", url=url)
        assert "errorText" not in result, f"{url}: {result['errorText']}"
        while "Page.loadEventFired" not in self._events:
            self._take(self._read(60))

    def evaluate(self, expression):
        """Value of a JavaScript expression (promises are waited for)."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def screenshot(self, path):
        """PNG of the whole page."""
        Path(path).write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])
        )
