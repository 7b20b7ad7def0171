"""Runs Chromium without a window, controlled through its debugging protocol."""

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import pytest
import tornado.httpclient
import tornado.websocket

_PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    _PROGRAM is None, reason="needs a browser: apt-get install chromium"
)


class Tab:
    """An open page.

    Attributes:
        requested: every URL that it asked for.
    """

    def __init__(self, socket: tornado.websocket.WebSocketClientConnection):
        self._socket, self._calls = socket, 0
        self.requested: list[str] = []

    async def Call(self, method: str, **params: Any) -> Any:
        """A method of the protocol, and what it gives."""
        self._calls += 1
        number = self._calls
        await self._socket.write_message(
            json.dumps({"id": number, "method": method, "params": params})
        )
        while True:
            message = json.loads(await self._socket.read_message() or "null")
            assert message, "chromium is gone"
            if message.get("method") == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]

    async def Eval(self, script: str) -> Any:
        """The value of an expression in the page."""
        out = await self.Call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in out, out
        return out["result"].get("value")

    async def Until(self, script: str) -> None:
        """Waits until an expression is true, up to 20 seconds."""
        for _ in range(400):
            if await self.Eval(f"Boolean({script})"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(
            f"not true: {script}; the page: {await self.Eval('document.body.innerText')}"
        )

    async def Open(self, url: str) -> None:
        """Goes to a page and waits until it is there."""
        await self.Call("Network.enable")
        await self.Call("Page.navigate", url=url)
        await self.Until(
            f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        )

    async def Type(self, text: str) -> None:
        """Puts text where the focus is."""
        await self.Call("Input.insertText", text=text)

    async def Press(self, key: str, ctrl: bool = False) -> None:
        """A key of the keyboard."""
        codes = {"Enter": 13, "Tab": 9, " ": 32}
        common = {"key": key, "windowsVirtualKeyCode": codes[key], "modifiers": 2 if ctrl else 0}
        text = {"text": "\r" if key == "Enter" else key} if key != "Tab" and not ctrl else {}
        await self.Call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        await self.Call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def Screenshot(self) -> bytes:
        """A PNG."""
        return base64.b64decode((await self.Call("Page.captureScreenshot"))["data"])


@contextlib.asynccontextmanager
async def opened_tab(width: int = 1000, height: int = 700) -> AsyncIterator[Tab]:
    """A new browser's only tab."""
    assert _PROGRAM
    # Its socket there may have a path of about 100 characters, which Bazel's test directories exceed.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                _PROGRAM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                "about:blank",
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": profile, "TMPDIR": profile},
        )
        try:
            address = await asyncio.to_thread(_address, process)
            client = tornado.httpclient.AsyncHTTPClient()
            for _ in range(100):
                tabs = json.loads((await client.fetch(f"http://{address}/json/list")).body)
                pages = [t["webSocketDebuggerUrl"] for t in tabs if t["type"] == "page"]
                if pages:
                    break
                await asyncio.sleep(0.05)
            tab = Tab(await tornado.websocket.websocket_connect(pages[0], max_message_size=1 << 26))
            yield tab
        finally:
            process.terminate()
            await asyncio.to_thread(process.communicate)


def _address(process: subprocess.Popen) -> str:
    """The address of the debugging protocol, which Chromium prints when it starts."""
    said = []
    for line in process.stderr or ():
        said.append(line)
        if match := re.search(r"DevTools listening on ws://([^/]+)/", line):
            return match[1]
    raise AssertionError(f"chromium did not start: {''.join(said)[-2000:]}")
