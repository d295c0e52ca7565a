"""Headless Chromium, driven by its DevTools protocol."""

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

DEADLINE_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--mute-audio"),
    *("--disable-features=Translate,OptimizationHints", "--remote-debugging-port=0", "about:blank"),
)


class Page:
    """One tab. `errors` are the uncaught exceptions and the refusals of its security policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self.errors: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, **params: Any) -> Any:
        """The result of a command. Raises AssertionError for an error."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(DEADLINE_S):
            message = await answer
        assert "error" not in message, (method, message["error"])
        return message["result"]

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited; it must be JSON."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        result = await self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(deadline_s):
                while not await self.evaluate(f"Boolean({expression})"):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never true: {expression}\n{text}") from None

    async def open(self, url: str, width: int = 1440, height: int = 1000, dark: bool = False) -> None:
        """Load `url` in a window of this size."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    async def type(self, selector: str, text: str) -> None:
        """Type into an element, as a keyboard does."""
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press and release a key such as Enter."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        result = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(result["data"]))

    async def receive(self) -> None:
        """Read answers and events until the connection ends."""
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                if not (answer := self._answers.pop(data["id"])).done():
                    answer.set_result(data)
            elif data["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(data["params"]["exceptionDetails"]))
            elif data["method"] == "Log.entryAdded" and data["params"]["entry"]["source"] == "security":
                self.errors.append(data["params"]["entry"]["text"])


@contextlib.asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    """A tab of a browser of its own; both end with the block. Raises AssertionError without Chromium."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    assert program, f"none of {', '.join(_NAMES)} is installed: on Debian, apt-get install chromium"
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [program, f"--user-data-dir={directory}", *_FLAGS],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            async with aiohttp.ClientSession() as session:
                address = await _address(session, Path(directory) / "DevToolsActivePort")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    reading = asyncio.create_task(page.receive())
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
                    reading.cancel()
        finally:
            process.kill()
            process.wait(DEADLINE_S)


async def _address(session: aiohttp.ClientSession, port_file: Path) -> str:
    """The websocket of the first tab."""
    async with asyncio.timeout(DEADLINE_S):
        while not (port_file.exists() and "\n" in port_file.read_text()):
            await asyncio.sleep(0.05)
        port = port_file.read_text().split("\n")[0]
        while True:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                tabs = [tab for tab in await response.json() if tab["type"] == "page"]
            if tabs:
                address: str = tabs[0]["webSocketDebuggerUrl"]
                return address
            await asyncio.sleep(0.05)
