"""Cancelling a call cancels its handler, on the other side of a socket."""

import trio

from amqp_rt import Container, Deadline, rpc
from amqp_rt.errors import DeadlineExceeded


@rpc("answer")
async def answer(question: str, *, deadline: Deadline) -> str:
    """Think for an hour, unless the caller has given up."""
    print(f"thinking about {question!r} for at most {deadline.remaining_s:.1f} s")
    try:
        await trio.sleep(3600)
    finally:
        print("the handler is over")
    return "42"


async def main() -> None:
    async with Container("sage", nodes=[answer]) as sage:
        (url,) = await sage.listen("amqp://127.0.0.1:0")
        async with sage.connect(url) as peer:
            try:
                await peer.call("answer", "why?", reply=str, within=0.5)
            except DeadlineExceeded as error:
                print(error)
            with trio.move_on_after(0.2):
                await peer.call("answer", "why not?", reply=str)
            await trio.sleep(0.1)


if __name__ == "__main__":
    trio.run(main)
