"""Operations of the administration: paths, statuses, rights, pages; entities in memory."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest
from administered import BEARER, MANAGER, MemoryEntities, SignedTokens, signed
from amqp_rt_servicebus.administration import (
    PAGE_MAX,
    AccessRefused,
    Administration,
    Response,
)
from amqp_rt_servicebus.atom import ATOM, ENTRY_TYPE, ERROR_TYPE, FEED_TYPE
from amqp_rt_servicebus.declarations import Queue, Rule, Subscription, Topic
from amqp_rt_servicebus.rule_documents import CONNECT
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.req("Z19")

HOST = "localhost:5672"


class Client:
    """Requests to one administration."""

    def __init__(self, entities: MemoryEntities | None = None, token: str | None = BEARER) -> None:
        self.entities = entities or MemoryEntities()
        self._administration = Administration(self.entities, SignedTokens())
        self._token = token

    def ask(self, method: str, target: str, options: str | bytes = b"", **headers: str) -> Response:
        """Send a request; *options* are a document, or ``Kind:elements`` of a description."""
        if isinstance(options, str):
            kind, _, elements = options.partition(":")
            options = (
                f'<entry xmlns="{ATOM}"><content>'
                f'<{kind}Description xmlns="{CONNECT}">{elements}</{kind}Description>'
                "</content></entry>"
            ).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        token = "Bearer a.b.c" if self._token == BEARER else self._token
        authorization = {} if token is None else {"authorization": token}
        return self._administration.handle(
            method, target, {"host": HOST} | authorization | given, options
        )

    def detail(self, *request: Any, **headers: str) -> tuple[int, str]:
        """Return the status and the sentence of a refusal."""
        response = self.ask(*request, **headers)
        assert response.headers["content-type"] == ERROR_TYPE
        root = ET.fromstring(response.body)
        assert root.findtext("Code") == str(response.status)
        return response.status, root.findtext("Detail") or ""


@pytest.fixture
def client() -> Client:
    client = Client()
    for path, declared in (
        (("Orders/eu",), Queue("Orders/eu")),
        (("Prices",), Topic("Prices")),
        (("Prices", "All"), Subscription("All", [Rule("First"), Rule("Second")])),
    ):
        client.entities.declare(path, declared)  # type: ignore[arg-type]
    return client


def entry(response: Response) -> tuple[str, str]:
    """Return id and title of an entry."""
    root = ET.fromstring(response.body)
    assert root.tag == f"{{{ATOM}}}entry"
    return root.findtext(f"{{{ATOM}}}id") or "", root.findtext(f"{{{ATOM}}}title") or ""


def feed(response: Response) -> tuple[list[str], dict[str, str]]:
    """Return titles and links of a feed."""
    assert (response.status, response.headers["content-type"]) == (200, FEED_TYPE)
    root = ET.fromstring(response.body)
    titles = [each.text or "" for each in root.iterfind(f"{{{ATOM}}}entry/{{{ATOM}}}title")]
    links = {each.attrib["rel"]: each.attrib["href"] for each in root.iterfind(f"{{{ATOM}}}link")}
    return titles, links


# -- paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "identity", "title"),
    [
        ("/Orders/eu", "Orders/eu", "Orders/eu"),
        ("/orders%2FEU/?enrich=true&api-version=2021-05", "Orders/eu", "Orders/eu"),
        (f"https://{HOST}/prices?enrich=false", "Prices", "Prices"),
        ("/prices/subscriptions/all", "prices/Subscriptions/All", "All"),
        ("/Prices/Subscriptions/ALL/", "Prices/Subscriptions/All", "All"),
        ("/Prices/SUBSCRIPTIONS/All/rules/first", "Prices/Subscriptions/All/Rules/First", "First"),
    ],
)
def test_entities_are_found_in_either_case_and_shown_as_declared(
    client: Client, target: str, identity: str, title: str
) -> None:
    response = client.ask("GET", target)
    assert (response.status, response.headers["content-type"]) == (200, ENTRY_TYPE)
    assert entry(response) == (f"https://{HOST}/{identity}", title)
    assert client.ask("HEAD", target) == response


@pytest.mark.parametrize(
    ("target", "titles"),
    [
        ("/$Resources/Queues", ["Orders/eu"]),
        ("/$resources/topics/?$skip=0&$top=100&api-version=2024-05", ["Prices"]),
        ("/Prices/Subscriptions/", ["All"]),
        ("/prices/subscriptions/all/Rules/", ["First", "Second"]),
    ],
)
def test_entities_are_listed(client: Client, target: str, titles: list[str]) -> None:
    found, links = feed(client.ask("GET", target))
    assert (found, list(links)) == (titles, ["self"])


@pytest.mark.parametrize(
    ("target", "status", "sentence"),
    [
        ("/nothing", 404, "'nothing' does not exist"),
        ("/Prices/subscriptions/nothing", 404, "'Prices/nothing' does not exist"),
        ("/nothing/subscriptions/", 404, "'nothing' does not exist"),
        ("/Prices/subscriptions/All/rules/nothing", 404, "does not exist"),
        ("/Prices/subscriptions/All/other/First", 404, "is the address of no entity"),
        ("/Prices/subscriptions/All/rules/First/x", 404, "is the address of no entity"),
        ("/$Resources/hubs", 404, "is no list of entities"),
        ("/$Resources", 404, "is no list of entities"),
        ("/", 400, "the address names no queue or topic"),
        ("/subscriptions/x", 400, "the address names no queue or topic"),
        ("//Orders", 400, "a name has at most 260"),
        ("/a%20b", 400, "entity 'a b': a name has at most 260"),
        ("/a/rules/b", 400, "the name contains a reserved part"),
        ("/Prices/subscriptions/a%20b", 400, "subscription 'a b': a name has at most 50"),
        ("/Prices/subscriptions/All/rules/a$b", 400, "rule 'a$b': a name has at most 50"),
        ("/%ff", 400, "the address '/%ff' is malformed"),
        ("http://[/q", 400, "is malformed"),
        ("/q?" + "&".join(f"a{each}=1" for each in range(30)), 400, "is malformed"),
        ("/" + "x" * 5000, 400, "the address has 5001 characters; at most 4096 are read"),
        ("/$Resources/queues?$skip=-1", 400, "$skip is '-1', not a whole number from 0"),
        ("/$Resources/queues?$top=x", 400, "$top is 'x', not a whole number"),
        ("/$Resources/queues?$top=0", 400, "$top is 0, but a page has at least 1 entity"),
        ("/$Resources/queues?$skip=" + "9" * 10, 400, "$skip is '9999999999', not a"),
        ("/$Resources/queues?$skip=%D9%A1", 400, "not a whole number"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    client: Client, target: str, status: int, sentence: str
) -> None:
    found, detail = client.detail("GET", target)
    assert found == status
    assert detail.startswith(f"SubCode={status}00. ")
    assert sentence in detail


@pytest.mark.parametrize(
    ("method", "target", "allowed"),
    [
        ("POST", "/Orders/eu", "GET, HEAD, PUT, DELETE"),
        ("PUT", "/$Resources/queues", "GET, HEAD"),
        ("DELETE", "/Prices/subscriptions/", "GET, HEAD"),
        ("PUT", "/$namespaceinfo", "GET, HEAD"),
    ],
)
def test_other_methods_are_refused(client: Client, method: str, target: str, allowed: str) -> None:
    response = client.ask(method, target)
    assert (response.status, response.headers["allow"]) == (405, allowed)


def test_health_is_only_read() -> None:
    assert Client(token=None).ask("POST", "/health").headers["allow"] == "GET, HEAD"


def test_a_long_host_is_refused(client: Client) -> None:
    assert client.detail("GET", "/Prices", host="x" * 301)[0] == 400


# -- create, update, delete --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "options", "path", "declared"),
    [
        ("/New", "Queue:<MaxDeliveryCount>3</MaxDeliveryCount>", ("new",), Queue("New", max_delivery_count=3)),
        ("/New", "Topic:", ("new",), Topic("New")),
        ("/prices/Subscriptions/New", "Subscription:", ("prices", "new"), Subscription("New")),
        ("/prices/subscriptions/all/rules/New", "Rule:", ("prices", "all", "new"), Rule("New")),
    ],
)  # fmt: skip
def test_put_creates_once(
    client: Client, target: str, options: str, path: tuple[str, ...], declared: object
) -> None:
    response = client.ask("PUT", target, options)
    assert (response.status, response.headers["content-type"]) == (201, ENTRY_TYPE)
    assert entry(response)[1] == "New"
    assert client.entities.found[path].declared == declared
    status, detail = client.detail("PUT", target, options)
    assert (status, detail.startswith("SubCode=40900. ")) == (409, True)


def test_a_queue_and_a_topic_share_one_name(client: Client) -> None:
    before = client.entities.found["prices",]
    assert client.detail("PUT", "/prices", "Queue:")[0] == 409
    assert client.entities.found["prices",] == before


def test_put_with_if_match_updates(client: Client) -> None:
    response = client.ask(
        "PUT", "/ORDERS/eu", "Queue:<LockDuration>PT9S</LockDuration>", if_match="*"
    )
    assert (response.status, entry(response)[1]) == (200, "Orders/eu")
    assert client.entities.found["orders/eu",].declared == Queue("Orders/eu", lock_duration=9)


def test_an_update_of_a_topic_keeps_its_subscriptions(client: Client) -> None:
    client.ask("PUT", "/prices", "Topic:<UserMetadata>u</UserMetadata>", if_match="*")
    assert feed(client.ask("GET", "/prices/subscriptions"))[0] == ["All"]


@pytest.mark.parametrize(
    ("target", "options", "status", "sentence"),
    [
        ("/nothing", "Queue:", 404, "does not exist"),
        ("/prices", "Queue:", 400, "topic 'Prices' cannot become a queue"),
        (
            "/orders/eu",
            "Queue:<RequiresSession>true</RequiresSession>",
            400,
            "RequiresSession is false and cannot be changed",
        ),
        ("/orders/eu", "Queue:<Status>Off</Status>", 400, "Status: 'Off' is not Active"),
        ("/orders/eu", "Subscription:", 400, "not one QueueDescription or TopicDescription"),
        ("/orders/eu", b"<entry", 400, "is no well-formed XML"),
        ("/orders/eu", b"<!DOCTYPE x><entry />", 400, "document type declaration"),
    ],
)
def test_an_update_that_cannot_be_changes_nothing(
    client: Client, target: str, options: str | bytes, status: int, sentence: str
) -> None:
    before = dict(client.entities.found)
    found, detail = client.detail("PUT", target, options, if_match="*")
    assert (found, sentence in detail) == (status, True)
    assert client.entities.found == before


def test_a_subscription_needs_its_topic(client: Client) -> None:
    assert client.detail("PUT", "/nothing/subscriptions/s", "Subscription:")[0] == 404


def test_quotas_are_forbidden() -> None:
    client = Client(MemoryEntities(entities_max=1))
    assert client.ask("PUT", "/a", "Queue:").status == 201
    status, detail = client.detail("PUT", "/b", "Queue:")
    assert (status, detail) == (403, "SubCode=40300. the namespace has 1 entities")


def test_delete_is_answered_by_an_empty_200(client: Client) -> None:
    assert client.ask("DELETE", "/Prices") == Response(200)
    assert list(client.entities.found) == [("orders/eu",)]
    assert client.detail("DELETE", "/Prices")[0] == 404


# -- pages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "sizes"),
    [
        ("&$top=7", [7] * 17 + [1]),
        ("&$top=60", [60, 60]),
        ("", [PAGE_MAX, 20]),
        ("&$top=9999", [PAGE_MAX, 20]),
        ("&$top=120", [PAGE_MAX, 20]),
    ],
)
def test_pages_follow_their_links(top: str, sizes: list[int]) -> None:
    client = Client()
    names = [f"q{number:03}" for number in range(120)]
    for name in names:
        client.entities.declare((name,), Queue(name))
    target, pages = f"/$Resources/queues?api-version=2021-05{top}", []
    while target:
        titles, links = feed(client.ask("GET", target))
        pages.append(titles)
        assert links["self"].startswith(f"https://{HOST}/$Resources/queues?$skip=")
        assert "api-version=2021-05" in links["self"]
        target = links.get("next", "")
    assert [len(each) for each in pages] == sizes
    assert [each for page in pages for each in page] == names


def test_a_page_behind_the_end_is_empty(client: Client) -> None:
    assert feed(client.ask("GET", "/$Resources/queues?$skip=999999999&$top=5"))[0] == []


# -- rights ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_line",
    [
        ("GET", "/orders/eu"),
        ("PUT", "/new", "Queue:"),
        ("DELETE", "/orders/eu"),
        ("GET", "/$Resources/queues"),
        ("GET", "/prices/subscriptions"),
        ("GET", "/$namespaceinfo"),
    ],
)
@pytest.mark.parametrize(
    ("token", "sentence"),
    [
        (None, "the request has no header Authorization"),
        ("nonsense", "not signed by a known key"),
        (lambda: signed(lives_s=-1), "the token has expired"),
        (lambda: signed("listener", f"https://{HOST}"), "does not give the right Manage at"),
        (lambda: signed(audience="https://elsewhere"), "the token is for elsewhere"),
        (lambda: signed(audience=f"https://{HOST}/other"), f"the token is for {HOST}/other"),
    ],
)
def test_each_operation_takes_the_right_to_manage(
    client: Client,
    request_line: tuple[str, ...],
    token: str | Callable[[], str] | None,
    sentence: str,
) -> None:
    before = dict(client.entities.found)
    stranger = Client(client.entities, token() if callable(token) else token)
    status, detail = stranger.detail(*request_line)
    assert (status, detail.startswith("SubCode=40100. "), sentence in detail) == (401, True, True)
    assert client.entities.found == before


@pytest.mark.parametrize(
    "audience",
    [f"https://{HOST}", f"sb://{HOST.upper()}/", f"https://{HOST}/orders/eu?api-version=2021-05"],
)
def test_a_token_for_the_entity_or_all_above_it_is_enough(client: Client, audience: str) -> None:
    token = signed(MANAGER, audience)
    assert Client(client.entities, token).ask("GET", "/Orders/eu").status == 200


def test_a_signature_may_be_called_a_bearer_token(client: Client) -> None:
    token = f"bearer {signed(audience=f'sb://{HOST}')}"
    assert Client(client.entities, token).ask("GET", "/Orders/eu").status == 200


def test_health_takes_no_token(client: Client) -> None:
    response = Client(client.entities, None).ask("GET", "/health")
    assert response.status == 200
    assert b'"healthy"' in response.body


def test_a_queue_may_be_named_health(client: Client) -> None:
    assert client.ask("PUT", "/health", "Queue:").status == 201
    assert entry(client.ask("GET", "/health"))[1] == "health"


FORWARDING = "Queue:<ForwardTo>sb://localhost/Orders/eu</ForwardTo>"
DEAD_FORWARDING = "Queue:<ForwardDeadLetteredMessagesTo>Orders/eu</ForwardDeadLetteredMessagesTo>"


@pytest.mark.parametrize(
    ("options", "header"),
    [
        (FORWARDING, "servicebussupplementaryauthorization"),
        (DEAD_FORWARDING, "servicebusdlqsupplementaryauthorization"),
    ],
)
def test_forwarding_takes_the_right_to_send_to_the_target(
    client: Client, options: str, header: str
) -> None:
    # A token for this entity only, as JavaScript's are.
    narrow = Client(client.entities, signed(audience=f"https://{HOST}/new"))
    status, detail = narrow.detail("PUT", "/new", options)
    assert (status, "gives the right Send at 'Orders/eu'" in detail) == (401, True)
    listening = signed("listener", HOST)
    assert narrow.detail("PUT", "/new", options, **{header: listening})[0] == 401
    assert ("new",) not in client.entities.found
    assert narrow.ask("PUT", "/new", options, **{header: signed(audience=HOST)}).status == 201


def test_the_right_to_manage_all_is_enough_to_forward(client: Client) -> None:
    assert client.ask("PUT", "/new", FORWARDING).status == 201


# -- anything else -----------------------------------------------------------------------------


def test_the_namespace_is_shown(client: Client) -> None:
    response = client.ask("GET", "/$NamespaceInfo?api-version=2021-05")
    assert entry(response) == (f"https://{HOST}/$namespaceinfo", "tests")


def test_an_authorizer_may_refuse_with_a_reason() -> None:
    class Refusing:
        def rights(self, token: str, resource: str) -> Any:
            raise AccessRefused(f"{token} is not for {resource}")

    administration = Administration(MemoryEntities(), Refusing())
    response = administration.handle("GET", "/q", {"host": "h", "authorization": " t "}, b"")
    assert b"SubCode=40100. t is not for https://h/q<" in response.body


@given(
    st.sampled_from(["GET", "PUT", "DELETE", "HEAD", "POST"]),
    st.lists(
        st.sampled_from(
            ["", "q", "t", "Subscriptions", "rules", "$Default", "$Resources", "queues", "%2f", "%"]
        )
        | st.text(max_size=4),
        max_size=6,
    ),
    st.sampled_from(["", "?$skip=1&$top=2", "?$top=x", "?%", "?a;b", "#f"]),
    st.booleans(),
)
def test_every_request_is_answered(method: str, parts: list[str], query: str, update: bool) -> None:
    client = Client()
    client.entities.declare(("t",), Topic("t"))
    headers = {"if-match": "*"} if update else {}
    response = client.ask(method, f"/{'/'.join(parts)}{query}", "Topic:", **headers)
    assert response.status in (200, 201, 400, 404, 405, 409)
    if response.body and response.headers["content-type"] != "application/json":
        ET.fromstring(response.body)
