"""Flower's client of RabbitMQ's HTTP API, unmodified: prints the queues that it sees, as JSON.

Arguments: URL of the broker, URL of the HTTP API, names of queues.
"""

from __future__ import annotations

import asyncio
import json
import sys

from flower.utils.broker import Broker


async def main() -> None:
    broker = Broker(sys.argv[1], http_api=sys.argv[2])
    print(json.dumps(await broker.queues(sys.argv[3:])))


asyncio.run(main())
