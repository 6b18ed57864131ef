"""A browser for tests: Chromium without a window, spoken to over a pipe. Nothing to install but Chromium itself."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

PROGRAM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")


class Browser:
    """One page in a browser of its own; use it in a `with`."""

    def __init__(self, folder: Path, *, width: int = 1000, height: int = 900) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [PROGRAM, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={folder}", "--disable-gpu"]
        command += ["--no-sandbox", "--disable-dev-shm-usage", "--no-first-run", f"--window-size={width},{height}"]

        def as_chromium_expects() -> None:
            # It reads commands from descriptor 3 and answers on 4.
            one, other = os.dup(to_read), os.dup(to_write)
            os.dup2(one, 3)
            os.dup2(other, 4)

        self._process = subprocess.Popen(
            command,
            preexec_fn=as_chromium_expects,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._received, self._events, self._last, self._session = b"", [], 0, ""
        target = self._asked("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._asked("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._asked("Page.enable")
        self._asked("Runtime.enable")
        self._asked("Log.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def open(self, address: str) -> None:
        self._loading(lambda: self._asked("Page.navigate", url=address), address)

    def value(self, script: str) -> object:
        """What an expression of JavaScript comes to on the page; a promise's is waited for."""
        answer = self._asked("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str = "main") -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, words: str) -> None:
        """Click the button that says, or stands for, these words, and wait for the page it leads to."""
        button = (
            f"[...document.querySelectorAll('button')].find(b => [b.value, b.innerText].includes({json.dumps(words)}))"
        )
        assert self.value(f"!!{button}"), f"there is no button {words!r} on the page"
        self._loading(lambda: self.value(f"{button}.click()"))

    def type(self, text: str) -> None:
        """Type into the field that has the focus."""
        assert self.value("document.hasFocus() && document.activeElement.tagName") == "INPUT", "no field has the focus"
        self._asked("Input.insertText", text=text)

    def press(self, key: str, *, leads_on: bool = False) -> None:
        """Press a key; `leads_on` waits for the page it leads to."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}

        def pressed() -> None:
            self._asked("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
            self._asked("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

        self._loading(pressed) if leads_on else pressed()

    def as_phone(self) -> None:
        self._asked("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)

    def picture(self, path: Path) -> None:
        data = self._asked("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """What the browser wrote into its console: errors, refused resources."""
        return [
            json.dumps(event)
            for event in self._events
            if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")
        ]

    def _loading(self, act, address: str = "") -> None:
        """Do it and wait for the page it leads to; the empty page of the start may still load and is not meant."""
        start = len(self._events)
        act()
        deadline = time.monotonic() + 20
        while not self._is_loaded(start, address):
            assert time.monotonic() < deadline, "no page was loaded"
            self._take(0.1)
        # The first frame gives `autofocus` its field, and may come after the load event; the second one follows it.
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def _is_loaded(self, start: int, address: str) -> bool:
        has_arrived = False
        for event in self._events[start:]:
            if event["method"] == "Page.frameNavigated":
                has_arrived = event["params"]["frame"]["url"].startswith(address)
            elif event["method"] == "Page.loadEventFired" and has_arrived:
                return True
        return False

    def _asked(self, method: str, **parameters: object) -> dict:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 30
        while True:
            for answer in self._take(0.5):
                if answer.get("id") == self._last:
                    assert "error" not in answer, answer
                    return answer["result"]
            assert time.monotonic() < deadline, f"Chromium did not answer {method}"

    def _take(self, seconds: float) -> list[dict]:
        """Answers that came; events are kept."""
        if select.select([self._read], [], [], seconds)[0]:
            self._received += os.read(self._read, 1 << 20)
        *whole, self._received = self._received.split(b"\0")
        messages = [json.loads(part) for part in whole]
        self._events += [message for message in messages if "method" in message]
        return [message for message in messages if "id" in message]
