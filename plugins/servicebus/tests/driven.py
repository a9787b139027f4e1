"""Clients of Azure's SDK for Python, with threads and with asyncio, behind the same plain calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Self


class Driven:
    """An object of the SDK whose calls return when they are done; lists are collected.

    Args:
        target: The object.
        run: Awaits a coroutine.
    """

    def __init__(self, target: Any, run: Callable[[Any], Any]) -> None:
        self.target = target
        self._run = run

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.target, name)
        if not callable(value):
            return Driven(value, self._run) if name == "session" and value is not None else value

        def call(*args: Any, **options: Any) -> Any:
            result = value(*args, **options)
            if inspect.isawaitable(result):
                result = self._run(result)
            wraps = name.startswith("get_") and hasattr(result, "close")
            return Driven(result, self._run) if wraps else result

        return call

    def __enter__(self) -> Self:
        if hasattr(self.target, "__aenter__"):
            self._run(self.target.__aenter__())
        else:
            self.target.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if hasattr(self.target, "__aexit__"):
            self._run(self.target.__aexit__(*error))
        else:
            self.target.__exit__(*error)


class Dialler:
    """Makes clients of one kind, and closes them in the end.

    Args:
        kind: ``threads`` or ``asyncio``.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._runner = asyncio.Runner()
        self._clients: list[Driven] = []

    def client(self, connection_string: str, **options: Any) -> Driven:
        """Return a client that repeats nothing."""
        if self._kind == "asyncio":
            from azure.servicebus.aio import ServiceBusClient
        else:
            from azure.servicebus import ServiceBusClient
        options.setdefault("retry_total", 0)
        client = Driven(
            ServiceBusClient.from_connection_string(connection_string, **options),
            self._runner.run,
        )
        self._clients.append(client.__enter__())
        return client

    def close(self) -> None:
        for each in reversed(self._clients):
            each.__exit__(None, None, None)
        self._runner.close()
