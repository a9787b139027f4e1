"""Costs of transports: our broker and our clients over plain TCP, TLS, WebSocket and both.

Each sample also measures plain TCP first, within the same minute: *over_tcp* is the ratio of the
broker's processor time to that over plain TCP.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from ..contestants import CREDIT, Contestant, Doors
from ..processes import RoleFailed, cpu_s
from ..rounds import Case, Sample
from . import Plan, size_name

#: Titles by scheme, plain TCP first.
WAYS = {"amqp": "TCP", "amqps": "TLS", "ws": "WebSocket", "wss": "WebSocket over TLS"}
LISTENERS = ["amqp://127.0.0.1:0", "amqps://127.0.0.1:0", "ws://127.0.0.1:0/", "wss://127.0.0.1:0/"]
SIZES = (100, 65_536)

_numbers = itertools.count()


class House:
    """Our brokers, each with a listener for every scheme, and with so many edge processes."""

    def __init__(self, plan: Plan, edges: int = 0) -> None:
        self._plan = plan
        self._edges = edges
        self._doors: dict[str, Doors] = {}
        self._certificate: tuple[str, str] | None = None
        self.ca = ""

    def doors(self, one: Contestant) -> Doors:
        if one.key not in self._doors:
            assert one.doors
            broker = one.doors(LISTENERS, self._certified(), self._edges)
            self._doors[one.key] = self._plan.stack.enter_context(broker)
        return self._doors[one.key]

    def _certified(self) -> tuple[str, str]:
        if self._certificate is None:
            import trustme

            folder = Path(self._plan.stack.enter_context(tempfile.TemporaryDirectory()))
            ca = trustme.CA()
            issued = ca.issue_cert("127.0.0.1")
            certificate, key, authority = (folder / name for name in ("cert", "key", "ca"))
            ca.cert_pem.write_to_path(str(authority))
            issued.private_key_pem.write_to_path(str(key))
            for blob in issued.cert_chain_pems:
                blob.write_to_path(str(certificate), append=True)
            self._certificate = str(certificate), str(key)
            self.ca = str(authority)
        return self._certificate


def cases(plan: Plan) -> list[Case]:
    house = House(plan)
    able = [one for one in plan.field.present.values() if one.doors]
    found = []
    for scheme, name in WAYS.items():
        for size in SIZES:
            runs = {one.key: partial(hop, plan, house, one, scheme, size) for one in able}
            found.append(Case("doors", f"{size_name(size)}, {name}", runs))
        runs = {one.key: partial(setup, plan, house, one, scheme) for one in able}
        found.append(Case("doors", f"connect, session, link, close, {name}", runs))
    return found


def _client(plan: Plan) -> Contestant:
    return plan.field.present.get("compiled") or plan.field.present["pure"]


def hop(plan: Plan, house: House, one: Contestant, scheme: str, size: int) -> Sample:
    doors = house.doors(one)
    each, rate = hop_each(plan, doors, house.ca, "amqp", size)
    plain = spent = sum(each)
    if scheme != "amqp":
        each, rate = hop_each(plan, doors, house.ca, scheme, size)
        spent = sum(each)
    return {"cpu_100k_s": spent * 100_000, "rate": rate, "over_tcp": spent / plain}


def hop_each(
    plan: Plan, doors: Doors, ca: str, scheme: str, size: int
) -> tuple[list[float], float]:
    """Return the seconds of each process of the broker for a message, and messages per second."""
    seconds = plan.settings.seconds
    common: dict[str, Any] = {
        "url": doors.urls[scheme], "ca": ca, "sasl": True, "address": f"doors-{next(_numbers)}",
    }  # fmt: skip
    client = _client(plan)
    with client.role("consume", credit=CREDIT, **common) as consumer:
        time.sleep(0.1)  # The consumer's credit has reached the broker
        before = [cpu_s([pid]) for pid in doors.pids]
        with client.role("source", size=size, settled=False, seconds=seconds, **common) as producer:
            sent = producer.result(60 + 5 * seconds)
        consumer.expect(sent["n"])
        heard = consumer.result(120)
        spent = [cpu_s([pid]) - had for pid, had in zip(doors.pids, before, strict=True)]
    count = heard["n"]
    if count != sent["n"]:
        raise RoleFailed(f"{count} of {sent['n']} messages arrived")
    if not heard["measured"]:
        raise RoleFailed("all messages arrived during the warm-up: measure more seconds")
    rate = heard["measured"] / (heard["last"] - heard["first"])
    return [each / count for each in spent], rate


def setup(plan: Plan, house: House, one: Contestant, scheme: str) -> Sample:
    doors = house.doors(one)
    each, rate = dial_each(plan, doors, house.ca, "amqp")
    plain = spent = sum(each)
    if scheme != "amqp":
        each, rate = dial_each(plan, doors, house.ca, scheme)
        spent = sum(each)
    return {"server_cpu_us": spent * 1e6, "connections": rate, "over_tcp": spent / plain}


def dial_each(plan: Plan, doors: Doors, ca: str, scheme: str) -> tuple[list[float], float]:
    """Return the seconds of each process of the broker for a connection, and connections per second."""
    seconds = plan.settings.seconds
    options = {"url": doors.urls[scheme], "ca": ca, "sasl": True, "address": "doors"}
    before = [cpu_s([pid]) for pid in doors.pids]
    with _client(plan).role("dial", seconds=seconds, **options) as dialler:
        done = dialler.result(30 + 3 * seconds)
    spent = [cpu_s([pid]) - had for pid, had in zip(doors.pids, before, strict=True)]
    return [each / done["n"] for each in spent], done["n"] / done["elapsed"]
