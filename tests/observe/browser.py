"""A headless Chromium, spoken to over pipes by its DevTools protocol: opens a file, runs expressions, presses keys, takes pictures."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

BINARY = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


class Browser:
    """One page. errors: what it has complained of."""

    def __init__(self, profile: Path, *, width: int = 1360, height: int = 900, dark: bool = False) -> None:
        assert BINARY is not None, "chromium isn't installed"
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        flags = f"--headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir={profile} --remote-debugging-pipe"
        command = f"exec {BINARY} {flags} --no-first-run about:blank 3<&{to_read} 4>&{to_write}"
        self._child = subprocess.Popen(["bash", "-c", command], pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self._number, self._rest, self._session = 0, b"", None
        self.errors: list[str] = []
        self.loaded = False
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._hear(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _hear(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = about["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if about["entry"]["level"] == "error":
                self.errors.append(about["entry"]["text"])
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning"):
                self.errors.append(str(about["args"]))
            case "Network.requestWillBeSent" if not about["request"]["url"].startswith(("file:", "data:", "about:", "blob:")):
                self.errors.append(f"asks the network for {about['request']['url']}")

    def open(self, file: Path, part: str = "") -> None:
        self.ask("Page.navigate", url=f"file://{file}{part}")
        self.until("document.documentElement?.dataset.ready === 'yes'")

    def until(self, expression: str, *, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression} doesn't come true; {self.errors}"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"]["description"])
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    def resize(self, width: int, height: int) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, file: Path) -> None:
        time.sleep(0.3)
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        os.close(self._write)
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        os.close(self._read)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
