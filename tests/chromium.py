"""A headless Chromium, driven over its DevTools protocol: one process, and a tab with its own cookies for each test."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio
import trio_websocket

#: Counts what the policy of a page has stopped, before the page begins.
_WATCH_POLICY = """
window.stopped = [];
document.addEventListener("securitypolicyviolation", (each) => {
  window.stopped.push(`${each.violatedDirective} ${each.blockedURI} ${each.sourceFile}:${each.lineNumber}`);
});
"""


class BrowserError(AssertionError):
    """The browser refused a command, or a script of the test failed."""


class Tab:
    """A page of the browser."""

    def __init__(self, socket: trio_websocket.WebSocketConnection) -> None:
        self._socket = socket
        self._count = 0
        self._replies: dict[int, tuple[trio.Event, list[Any]]] = {}
        self._loaded = trio.Event()
        #: Errors of scripts, and errors in the log but those about answers.
        self.errors: list[str] = []
        self.session = ""

    async def read(self) -> None:
        """Take replies and events, until cancelled or the browser ends."""
        while True:
            try:
                told = json.loads(await self._socket.get_message())
            except trio_websocket.ConnectionClosed:
                return
            if "id" in told:
                done, place = self._replies.pop(told["id"])
                place.append(told)
                done.set()
            elif told["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif told["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(told["params"]["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded":
                entry = told["params"]["entry"]
                # Neither a refusal, which has a page of its own, nor advice is a fault of the page.
                if entry["source"] != "network" and entry["level"] == "error":
                    self.errors.append(str(entry["text"]))

    async def send(self, method: str, **given: Any) -> dict[str, Any]:
        """Perform a command of the protocol and return its result."""
        self._count += 1
        number = self._count
        done, place = self._replies[number] = trio.Event(), []
        message = {"id": number, "method": method, "params": given}
        if self.session:
            message["sessionId"] = self.session
        await self._socket.send_message(json.dumps(message))
        await done.wait()
        if "error" in place[0]:
            raise BrowserError(f"{method}: {place[0]['error']}")
        result: dict[str, Any] = place[0]["result"]
        return result

    async def evaluate(self, expression: str) -> Any:
        """Return the value of *expression* in the page, which may be a promise."""
        found = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise BrowserError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """Wait, at the end of the block, until the page that it leads to has loaded."""
        self._loaded = trio.Event()
        yield
        with trio.fail_after(30):
            await self._loaded.wait()

    async def open(self, url: str) -> None:
        """Load *url*."""
        async with self.loading():
            await self.send("Page.navigate", url=url)

    async def submit(self, form: str, **given: str) -> None:
        """Fill in the fields *given* of the form that the CSS selector *form* names, and send it."""
        async with self.loading():
            await self.evaluate(
                f"""(() => {{
                  const form = document.querySelector({json.dumps(form)});
                  for (const [name, value] of Object.entries({json.dumps(given)})) {{
                    const field = form.elements[name];
                    if (field.type === "checkbox") field.checked = true; else field.value = value;
                  }}
                  form.requestSubmit();
                }})()"""
            )

    async def follow(self, text: str) -> None:
        """Load the page that the first link with *text* leads to."""
        async with self.loading():
            await self.evaluate(
                f"[...document.links].find((each) => each.textContent.trim() === {json.dumps(text)}).click()"
            )

    async def text(self) -> str:
        """Return the text of the page."""
        return str(await self.evaluate("document.body.innerText"))

    async def until(self, expression: str) -> None:
        """Wait until *expression* is true in the page."""
        with trio.fail_after(30):
            while not await self.evaluate(expression):  # noqa: ASYNC110 - the page is another process
                await trio.sleep(0.05)


class Browser:
    """A running browser."""

    def __init__(self, port: int, path: str) -> None:
        self._url = f"ws://127.0.0.1:{port}{path}"

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """Open a tab that shares no cookies with others, and close it."""
        async with (
            trio_websocket.open_websocket_url(self._url, max_message_size=64 << 20) as socket,
            trio.open_nursery() as nursery,
        ):
            tab = Tab(socket)
            nursery.start_soon(tab.read)
            context = await tab.send("Target.createBrowserContext", disposeOnDetach=True)
            made = await tab.send(
                "Target.createTarget",
                url="about:blank",
                browserContextId=context["browserContextId"],
            )
            joined = await tab.send(
                "Target.attachToTarget", targetId=made["targetId"], flatten=True
            )
            tab.session = joined["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                await tab.send(f"{domain}.enable")
            await tab.send("Page.addScriptToEvaluateOnNewDocument", source=_WATCH_POLICY)
            yield tab
            nursery.cancel_scope.cancel()


@contextmanager
def running(command: Sequence[str], profile: Path) -> Iterator[Browser]:
    """Run the browser of *command* with the folder *profile*."""
    process = subprocess.Popen(
        [
            *command,
            # In a container there is no sandbox to be had; the pages are our own.
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        file = profile / "DevToolsActivePort"
        until = time.monotonic() + 60
        while not file.exists() or file.read_text("utf-8").count("\n") < 1:
            assert process.poll() is None, "the browser has ended"
            assert time.monotonic() < until, "the browser does not start"
            time.sleep(0.05)
        port, _, path = file.read_text("utf-8").partition("\n")
        yield Browser(int(port), path.strip())
    finally:
        process.kill()
        process.wait()
