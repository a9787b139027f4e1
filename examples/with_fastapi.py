"""A FastAPI application that serves AMQP as well: HTTP on one side, a node and a queue on the other.

Serve it with ``uvicorn examples.with_fastapi:app``; run as a program, it makes a few requests to itself.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from amqp_rt import aio, rpc
from amqp_rt.broker import Queue

stock = {"A-1": 7}


@rpc("stock/{sku}")
async def in_stock(sku: str) -> int:
    """Return the stock of *sku*; a handler is a coroutine of asyncio, as the routes of FastAPI are."""
    return stock.get(sku, 0)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with aio.Broker(nodes=[in_stock]) as broker:
        await broker.declare(Queue("orders"))
        app.state.urls = await broker.listen("amqp://127.0.0.1:0")
        async with broker.local() as peer, peer.sender("orders") as orders:
            app.state.peer, app.state.orders = peer, orders
            yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders/{sku}")
async def order(sku: str, request: Request) -> dict[str, int]:
    await request.app.state.orders.send({"sku": sku})  # waits until the queue has it
    return {"left": await request.app.state.peer.call(f"stock/{sku}", reply=int, within=2)}


if __name__ == "__main__":
    with TestClient(app) as client:
        print(client.post("/orders/A-1").json())
        print(client.post("/orders/B-2").json())
        print("and every AMQP 1.0 client reaches the queue at", app.state.urls[0])
