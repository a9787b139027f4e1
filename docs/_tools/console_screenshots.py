"""Take the pictures of the guide to the console: a broker with traffic, in a headless Chromium.

``python docs/_tools/console_screenshots.py`` writes them to ``docs/_static/console``. Needs chromium.
"""

from __future__ import annotations

import base64
import math
import random
import shutil
import sys
import tempfile
from pathlib import Path

import trio
from amqp_rt_console import HttpDoor
from amqp_rt_console.pages import history

from amqp_rt import Broker, Message, Plain
from amqp_rt.broker import Log, Queue, Topic

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from chromium import Tab, running  # noqa: E402

PICTURES = ROOT / "docs" / "_static" / "console"
USER, PASSWORD = "ada", "s3cret"
#: Samples come faster than in earnest: a picture must not take an hour.
STEP_S = 0.1
SAMPLES = 150


async def _take(tab: Tab, name: str, height: int) -> None:
    await tab.send(
        "Emulation.setDeviceMetricsOverride",
        width=900,
        height=height,
        deviceScaleFactor=1,
        mobile=False,
    )
    shot = await tab.send("Page.captureScreenshot", format="png", optimizeForSpeed=False)
    data = base64.b64decode(shot["data"])
    (PICTURES / f"{name}.png").write_bytes(data)
    print(f"{name}.png: {len(data):,} bytes")


async def _traffic(broker: Broker) -> None:
    """Let the depth of a queue go up and down."""
    async with (
        broker.local() as peer,
        peer.sender("orders") as out,
        peer.receiver("orders") as inbox,
    ):
        for step in range(10_000):
            for _ in range(max(0, round(4 + 3 * math.sin(step / 12) + random.random()))):
                await out.send({"total": step})
            for _ in range(max(0, round(3 + 3 * math.sin(step / 12 - 1) + random.random()))):
                with trio.move_on_after(0.01):
                    (await inbox.receive()).accept()
            await trio.sleep(STEP_S)


async def _main(command: str) -> None:
    history.STEP_S = STEP_S  # type: ignore[misc]
    broker = Broker("shop", users={USER: PASSWORD})
    door = HttpDoor(broker, "http://127.0.0.1:0")
    with tempfile.TemporaryDirectory() as folder, running([command], Path(folder)) as browser:
        async with broker, door.open() as url, browser.tab() as tab, trio.open_nursery() as nursery:
            await broker.declare(
                Queue("orders", dead_letter="orders/dead", max_deliveries=5),
                Queue("invoices"),
                Topic("prices"),
                Log("clicks", partitions=3),
            )
            for number in range(40):
                broker.publish("invoices", Message({"number": number}).encode())
                broker.publish("clicks", Message({"page": number}).encode())
            (amqp,) = await broker.listen("amqp://127.0.0.1:0")
            nursery.start_soon(_traffic, broker)
            await tab.open(f"{url}/types/amqp_rt.node/entity?name=orders")
            await tab.submit("form.login", user=USER, password=PASSWORD)
            await tab.submit('form[action="/watch"]')
            await trio.sleep(STEP_S * SAMPLES)
            await tab.open(f"{url}/types/amqp_rt.node?sort=-available")
            await _take(tab, "nodes", 560)
            await tab.open(f"{url}/types/amqp_rt.node/entity?name=orders")
            await _take(tab, "node", 640)
            await tab.open(f"{url}/ladder")
            await tab.submit('form[action="/ladder"]')
            async with (
                broker.connect(amqp, auth=Plain(USER, PASSWORD)) as peer,
                peer.sender("invoices") as out,
            ):
                await out.send({"number": 41})
            await trio.sleep(1)
            await _take(tab, "ladder", 470)
            nursery.cancel_scope.cancel()


def main() -> None:
    """Write the pictures."""
    command = shutil.which("chromium")
    if command is None:
        sys.exit("chromium is not installed")
    PICTURES.mkdir(parents=True, exist_ok=True)
    trio.run(_main, command)


if __name__ == "__main__":
    main()
