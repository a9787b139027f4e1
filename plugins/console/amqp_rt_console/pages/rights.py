"""The page of rights: whether a user may do something at an address, as the code that judges connections decides it."""

from __future__ import annotations

from amqp_rt.errors import AmqpError

from .rendering import Page
from .texts import shown
from .visits import Visit


async def show_rights(visit: Visit) -> Page:
    """Return the form, and the answer to the question in the request."""
    given = {key: visit.query(key) for key in ("user", "right", "address")}
    verdict = reason = failure = ""
    if given["address"]:
        asked = {key: text for key, text in given.items() if text}
        try:
            found = (await visit.there.request("EXPLAIN", **asked)).body
        except AmqpError as error:
            failure = error.description
        else:
            verdict = "Yes" if found["allowed"] else "No"
            reason = shown(found["reason"])
    return Page(
        "rights.html",
        "Rights",
        {"here": "/rights", "given": given, "verdict": verdict, "reason": reason},
        failure=failure,
        status=400 if failure else 200,
    )
