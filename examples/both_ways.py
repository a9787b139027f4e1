"""Two containers, one socket: each calls the other over the connection that one of them opened."""

import trio

from amqp_rt import Connection, Container, rpc


@rpc("greet")
async def greet(name: str, caller: Connection) -> str:
    """Call the caller back, over its own connection, before answering."""
    language = await caller.call("language", reply=str, within=2)
    return {"en": "Hello", "fr": "Bonjour"}[language] + f", {name}"


@rpc("language")
async def language() -> str:
    return "fr"


async def main() -> None:
    async with (
        Container("server", nodes=[greet]) as server,
        Container("client", nodes=[language]) as client,
    ):
        (url,) = await server.listen("amqp://127.0.0.1:0")
        async with client.connect(url) as peer:
            print(await peer.call("greet", "Ada", reply=str, within=2))


if __name__ == "__main__":
    trio.run(main)
