"""The console in a browser: each act, without script, without rights, read-only, with hostile names, and for everybody."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import pytest
import trio
from chromium import Browser, Tab
from console_site import USERS, console

from amqp_rt import Broker, Message, Plain
from amqp_rt.broker import Log, Queue, Schedule, Topic

pytestmark = pytest.mark.req("G6")

#: Rules of WCAG 2.2, levels A and AA, and those that axe recommends.
_AXE = """
axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]})
  .then((found) => found.violations.map((each) => `${each.id}: ${each.nodes.map((n) => n.html).join(" | ")}`))
"""
#: Names, texts and octets that a careless page would run.
HOSTILE = [
    "<script>window.struck=1</script>",
    "<img src=x onerror=window.struck=1>",
    "\"'><svg/onload=window.struck=1>",
    "javascript:window.struck=1",
    "</textarea></title></style></script><script>window.struck=1</script>",
    "{{ 7*7 }}{% raw %}${window.struck=1}`",
    "&lt;script&gt;&#60;script>window.struck=1",
    "a\u202eb\u0000c\u2028d\x1b[31m\ufeff",
    "../../login?next=//example.org#<b>",
    "<!--<a href='data:text/html,<script>window.struck=1</script>'>",
]


async def log_in(tab: Tab, url: str, user: str = "ada") -> None:
    await tab.open(url)
    await tab.submit("form.login", user=user, password=USERS[user])


async def no_faults(tab: Tab) -> None:
    """Check that neither the policy nor a script had anything to say, and that no foreign script ran."""
    assert await tab.evaluate("window.stopped") == []
    assert await tab.evaluate("window.struck === undefined")
    assert tab.errors == []


def act(operation: str) -> str:
    return f'form:has(input[name="operation"][value="{operation}"])'


async def node(tab: Tab, url: str, name: str) -> None:
    await tab.open(f"{url}/types/amqp_rt.node/entity?name={name}")


@pytest.mark.smoke
async def test_each_act_on_nodes(browser: Browser) -> None:
    async with console() as (broker, url), browser.tab() as tab:
        await log_in(tab, f"{url}/types/amqp_rt.node")
        assert "Nodes" in await tab.text()

        # Create, with an option of each control.
        await tab.follow("New queue")
        await tab.submit(
            "main form",
            **{
                "name": "orders",
                "a.max_deliveries": "5",
                "a.dead_letter": "dead",
                "a.overflow": "reject",
            },
        )
        assert "Queue orders was created" in await tab.text()
        declared = broker.declaration("orders")
        assert isinstance(declared, Queue)
        assert (declared.max_deliveries, declared.overflow) == (5, "reject")

        # What is wrong with a form is said, and what was typed stays.
        await tab.open(f"{url}/types/amqp_rt.queue/new")
        await tab.submit("main form", **{"name": "more", "a.max_deliveries": "many"})
        assert "max deliveries must be a number" in await tab.text()
        assert (
            await tab.evaluate("document.querySelector('[name=\"a.max_deliveries\"]').value")
            == "many"
        )

        # Change.
        await node(tab, url, "orders")
        await tab.submit(act("UPDATE"), **{"a.max_deliveries": "7"})
        assert "max deliveries changed" in await tab.text()
        changed = broker.declaration("orders")
        assert isinstance(changed, Queue)
        assert (changed.max_deliveries, changed.overflow) == (7, "reject")

        # Publish, and look.
        await tab.submit(
            'form[action="/publish"]',
            body='{"total": 12}',
            content_type="application/json",
            subject="first",
            properties="colour=blue",
            count="3",
        )
        assert "3 published to orders" in await tab.text()
        await tab.follow("Look at messages")
        text = await tab.text()
        assert '"total": 12' in text
        assert "colour" in text
        assert broker.stats("orders").available == 3

        # Move one, by the form made of the arguments of the operation.
        await node(tab, url, "orders")
        await tab.submit(act("MOVE"), **{"p.to": "dead", "p.count": "1"})
        assert "1 messages moved" in await tab.text()
        assert (broker.stats("orders").available, broker.stats("dead").available) == (2, 1)

        # Purge and delete ask for the name.
        await tab.submit(act("PURGE"), confirm="order")
        assert "nothing was done" in await tab.text()
        assert broker.stats("orders").available == 2
        await tab.submit(act("PURGE"), confirm="orders")
        assert "2 messages dropped" in await tab.text()
        await tab.submit(act("DELETE"), confirm="dead")
        assert "nothing was done" in await tab.text()
        assert broker.has("orders")
        await tab.submit(act("DELETE"), confirm="orders")
        assert "Queue orders: delete was done" in await tab.text()
        assert not broker.has("orders")
        await no_faults(tab)


async def test_acts_on_connections_users_and_rights(browser: Browser) -> None:
    async with console() as (broker, url), browser.tab() as tab:
        await broker.declare(Queue("orders"))
        (amqp,) = await broker.listen("amqp://127.0.0.1:0")
        await log_in(tab, f"{url}/types/amqp_rt.connection")
        async with broker.connect(amqp, auth=Plain("bob", USERS["bob"]), reconnect=None) as peer:
            await tab.open(f"{url}/types/amqp_rt.connection?q=&sort=-name")
            [(path, _)] = [
                each
                for each in await tab.evaluate(
                    "[...document.querySelectorAll('tbody tr')].map((row) =>"
                    " [row.querySelector('a').href, row.innerText])"
                )
                if "bob" in each[1]
            ]
            await tab.open(path)
            await tab.submit(act("DELETE"))
            assert "close was done" in await tab.text()
            with trio.fail_after(10):
                await peer.wait_closed()

        await tab.open(f"{url}/types/amqp_rt.user/new")
        await tab.submit("main form", **{"name": "joe", "a.password": "s3cret"})
        assert "User joe was created" in await tab.text()
        async with broker.connect(amqp, auth=Plain("joe", "s3cret")):
            pass
        await tab.submit(act("DELETE"), confirm="joe")
        assert "User joe: delete was done" in await tab.text()

        await tab.open(f"{url}/rights")
        await tab.submit("main form", user="bob", right="send", address="orders")
        assert "Yes" in await tab.text()
        await tab.submit("main form", user="bob", right="manage", address="orders")
        assert "the right to manage" in await tab.text()

        async with tab.loading():
            await tab.evaluate("document.querySelector('form[action=\"/logout\"]').requestSubmit()")
        assert "Log in" in await tab.text()
        await no_faults(tab)


async def test_numbers_and_frames_appear_while_a_page_is_open(browser: Browser) -> None:
    async with console() as (broker, url), browser.tab() as tab:
        await broker.declare(Queue("orders"))
        (amqp,) = await broker.listen("amqp://127.0.0.1:0")
        await log_in(tab, url)
        await node(tab, url, "orders")
        assert (
            await tab.evaluate("document.querySelector('[data-key=available]').textContent") == "0"
        )
        broker.publish("orders", Message("new").encode())
        await tab.until("document.querySelector('[data-key=available]').textContent === '1'")

        await tab.submit('form[action="/watch"]')
        assert "Stop watching" in await tab.text()
        assert await tab.evaluate("document.querySelectorAll('svg.plot').length") == 2

        await tab.open(f"{url}/ladder")
        await tab.submit('form[action="/ladder"]')
        async with (
            broker.connect(amqp, auth=Plain("bob", USERS["bob"])) as peer,
            peer.sender("orders") as out,
        ):
            await out.send("a body that no ladder shows")
            await tab.until("document.body.innerText.includes('transfer')")
        await tab.until("document.body.innerText.includes('the connection is over')")
        text = await tab.text()
        assert "sasl-init" in text
        assert "bob" in text
        assert USERS["bob"] not in text
        assert "a body that" not in text
        await no_faults(tab)


async def test_pages_work_without_script(browser: Browser) -> None:
    async with console() as (broker, url), browser.tab() as tab:
        await tab.send("Emulation.setScriptExecutionDisabled", value=True)
        await log_in(tab, f"{url}/types/amqp_rt.queue/new")
        await tab.submit("main form", name="orders")
        await tab.submit('form[action="/publish"]', body="by hand")
        await tab.follow("Look at messages")
        assert "by hand" in await tab.text()
        await node(tab, url, "orders")
        await tab.submit(act("PURGE"), confirm="orders")
        assert broker.stats("orders").available == 0
        await tab.submit('form[action="/watch"]')
        assert await tab.evaluate("document.querySelectorAll('svg.plot').length") == 2
        await tab.open(f"{url}/ladder")
        await tab.submit('form[action="/ladder"]')
        await tab.follow("Reload every 5 seconds")
        assert "Do not reload" in await tab.text()


async def test_read_only_has_no_forms(browser: Browser) -> None:
    async with console(read_only=True) as (broker, url), browser.tab() as tab:
        await broker.declare(Queue("orders"))
        await log_in(tab, f"{url}/types/amqp_rt.node")
        assert "New queue" not in await tab.text()
        await node(tab, url, "orders")
        forms = (
            "[...document.querySelectorAll('main form')].map((each) => each.getAttribute('action'))"
        )
        assert await tab.evaluate(forms) == ["/watch"]
        # Who sends the form all the same is refused.
        status = await tab.evaluate(
            """fetch("/types/amqp_rt.queue/act", {method: "POST",
              headers: {"Content-Type": "application/x-www-form-urlencoded"},
              body: new URLSearchParams({operation: "DELETE", name: "orders", confirm: "orders",
                csrf: document.querySelector("[name=csrf]").value})}).then((reply) => reply.status)"""
        )
        assert status == 403
        assert broker.has("orders")


async def test_a_user_without_rights_is_told_so(browser: Browser) -> None:
    async with console() as (broker, url), browser.tab() as tab:
        await broker.declare(Queue("orders"))
        await log_in(tab, url, "bob")
        assert "does not have" in await tab.text()
        for path in (
            *("/types/amqp_rt.node/entity?name=orders", "/types/amqp_rt.connection", "/ladder"),
            *("/messages?name=orders", "/journal", "/rights?user=ada&right=send&address=orders"),
        ):
            await tab.open(url + path)
            text = await tab.text()
            assert "right" in text, (path, text)
            assert "12" not in text
        status = await tab.evaluate(
            """fetch("/types/amqp_rt.queue/act", {method: "POST",
              headers: {"Content-Type": "application/x-www-form-urlencoded"},
              body: new URLSearchParams({operation: "DELETE", name: "orders", confirm: "orders",
                csrf: document.querySelector("[name=csrf]").value})}).then((reply) => reply.status)"""
        )
        assert status == 403
        assert broker.has("orders")
        assert await tab.evaluate("window.stopped") == []


async def test_names_bodies_and_properties_are_text(browser: Browser) -> None:
    async with console() as (broker, url), browser.tab() as tab:
        for text in HOSTILE:
            await broker.declare(Queue(text, dead_letter=f"{text} dead"))
            message = Message(
                text,
                subject=text,
                application_properties={text: text},
                message_annotations={"x-opt-hostile": text},
            )
            broker.publish(text, message.encode())
        await log_in(tab, f"{url}/types/amqp_rt.node")
        scripts = "document.querySelectorAll('script').length"
        assert await tab.evaluate(scripts) == 1
        await no_faults(tab)
        paths = await tab.evaluate(
            "[...document.querySelectorAll('tbody th a')].map((a) => a.href)"
        )
        # There is also the queue for replies to the console itself.
        assert len(paths) > 2 * len(HOSTILE)
        # Each queue; the pages of those for their dead letters are no different.
        for path in [each for each in paths if not each.endswith("+dead")]:
            await tab.open(path)
            assert await tab.evaluate(scripts) == 1
            assert (await tab.evaluate("document.links.length")) > 0
            assert await tab.evaluate(
                "[...document.links].every((each) => each.href.startsWith(location.origin))"
            )
        for text in HOSTILE:
            await tab.open(f"{url}/messages?{urlencode({'name': text})}")
            body = await tab.evaluate("document.querySelector('pre').textContent")
            assert body == text or "\\u202e" in body
        await tab.open(f"{url}/types/amqp_rt.node?{urlencode({'q': HOSTILE[2]})}")
        assert await tab.evaluate(scripts) == 1
        await no_faults(tab)


async def _everything(broker: Broker) -> None:
    await broker.declare(
        Queue("orders", dead_letter="dead"), Topic("prices"), Log("clicks", partitions=2)
    )
    await broker.declare(Schedule("nightly", to="orders", every_s=3600))
    for number in range(3):
        broker.publish("orders", Message({"total": number}, subject="one").encode())


async def test_pages_are_for_everybody(browser: Browser, axe: str) -> None:
    async with console() as (broker, url), browser.tab() as tab:
        await _everything(broker)
        found: dict[str, Any] = {}

        # Sent once: half a megabyte takes its time.
        await tab.send("Page.addScriptToEvaluateOnNewDocument", source=axe)

        async def examine(path: str) -> None:
            await tab.open(url + path)
            await tab.evaluate(
                "for (const each of document.querySelectorAll('details')) each.open = true"
            )
            if violations := await tab.evaluate(_AXE):
                found[path] = violations

        await examine("/login")
        await log_in(tab, f"{url}/types/amqp_rt.node/entity?name=orders")
        await tab.submit('form[action="/watch"]')
        await tab.open(f"{url}/ladder")
        await tab.submit('form[action="/ladder"]')
        for path in (
            *("/", "/types/amqp_rt.node", "/types/amqp_rt.node/entity?name=orders"),
            *("/types/amqp_rt.node/entity?name=clicks", "/types/amqp_rt.queue/new"),
            *("/messages?name=orders", "/rights?user=bob&right=send&address=orders", "/ladder"),
            *("/dead-letters", "/types/amqp_rt.connection", "/types/no.such"),
        ):
            await examine(path)
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        await tab.send("Emulation.setEmulatedMedia", features=dark)
        for path in ("/types/amqp_rt.node/entity?name=orders", "/ladder"):
            await examine(path)
        assert found == {}


async def test_every_page_of_the_navigation_opens_by_keyboard(browser: Browser) -> None:
    async with console(journal=True) as (broker, url), browser.tab() as tab:
        await _everything(broker)
        await log_in(tab, url)
        paths = await tab.evaluate(
            "[...document.querySelectorAll('nav a')].map((each) => each.href)"
        )
        assert len(paths) > 12
        for path in paths:
            await tab.open(path)
            assert await tab.evaluate("document.querySelector('[aria-current=page]') !== null"), (
                path
            )
            assert "did not work" not in await tab.text()
        # The first stop is the link past the navigation.
        for kind in ("keyDown", "keyUp"):
            await tab.send(
                "Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9
            )
        assert await tab.evaluate("document.activeElement.textContent") == "Skip to content"
        await no_faults(tab)
