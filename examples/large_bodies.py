"""A body of 256 MiB passes through a handler in pieces, and is never in memory as a whole."""

import hashlib
from collections.abc import AsyncIterator

import trio

from amqp_rt import Container, node

PIECE = bytes(range(256)) * 4096
COUNT = 256

seen = hashlib.sha256()


@node("uploads", streaming=True)
async def upload(body: AsyncIterator[bytes]) -> None:
    """Read the body as it arrives; link flow slows the sender down to our speed."""
    async for piece in body:
        seen.update(piece)


async def main() -> None:
    sent = hashlib.sha256()
    async with Container("store", nodes=[upload]) as store:
        (url,) = await store.listen("amqp://127.0.0.1:0")
        async with (
            store.connect(url) as peer,
            peer.sender("uploads") as uploads,
            uploads.stream(content_type="application/octet-stream") as body,
        ):
            for _ in range(COUNT):
                sent.update(PIECE)
                await body.write(PIECE)
    assert seen.digest() == sent.digest()
    print(f"{COUNT * len(PIECE):,} bytes arrived as they were sent")


if __name__ == "__main__":
    trio.run(main)
