"""A headless Chromium over its debugging pipe: opens a file, presses keys, reads the page, collects its complaints.

Only the standard library is needed. The browser reads commands on its descriptor 3 and answers on 4, each message
ending in a zero byte.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def executable() -> str | None:
    """The browser of this machine, if any."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page; use as a context manager."""

    def __init__(self, program: str) -> None:
        self.complaints: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True)
        inward, self._write = os.pipe()
        self._read, outward = os.pipe()
        options = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run --disable-dev-shm-usage"

        def place_pipe() -> None:
            spare = os.dup2(inward, 100), os.dup2(outward, 101)  # either end may be 3 or 4 itself
            for end, number in zip(spare, (3, 4), strict=True):
                os.dup2(end, number)
                os.close(end)

        self._process = subprocess.Popen(
            [program, *options.split(), f"--user-data-dir={self._profile.name}", "about:blank"],
            close_fds=False,  # Python's own are not inherited anyway
            preexec_fn=place_pipe,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(inward)
        os.close(outward)
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        target = next(one for one in self._call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the session that this object started
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            if not part:
                raise RuntimeError("the browser has gone")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _note(self, message: dict[str, Any]) -> None:
        what, told = message.get("method"), message.get("params", {})
        if what == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif what == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif what == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(told["args"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        request = {"id": number, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._note(message)

    def open(self, page: Path, fragment: str = "", width: int = 1280, height: int = 900) -> None:
        """Load a file anew in a window of this size and wait until it is complete."""
        self._call("Page.navigate", url="about:blank")
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        self._call("Page.navigate", url=page.resolve().as_uri() + fragment)
        deadline = time.monotonic() + 30
        while self.read("location.protocol + document.readyState") != "file:complete":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.02)

    def read(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description"))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """One key, as a keyboard sends it: Tab, Enter or Space."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r"), "Space": (32, " ")}[key]
        name = " " if key == "Space" else key
        common = {"key": name, "code": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self._call("Input.dispatchKeyEvent", type="keyUp", **common)

    def click(self, selector: str) -> None:
        """A press of the mouse in the middle of the first element that fits the selector."""
        place = self.read(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            "element.scrollIntoView({block: 'center'});"
            "const box = element.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1, buttons=1
            )

    def enter(self, selector: str, text: str) -> None:
        """Put a text into an input, as typing does."""
        self.read(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            f"element.value = {json.dumps(text)}; element.dispatchEvent(new Event('input')); }})()"
        )

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page, all of it or what the window shows."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
