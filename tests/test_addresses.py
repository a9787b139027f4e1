from __future__ import annotations

import itertools
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from amqp_rt.addresses import (
    AddressError,
    AddressTable,
    Pattern,
    Url,
    Wildcards,
    address_of,
    origin_of,
    parse_url,
    parse_urls,
)
from amqp_rt.errors import ConnectFailed

# --- Patterns ---


@pytest.mark.req("A1")
@pytest.mark.parametrize(
    ("pattern", "address", "captures"),
    [
        ("orders", "orders", {}),
        ("orders", "Orders", None),
        ("orders", "orders/", None),
        ("orders", "", None),
        ("a/b", "a/b", {}),
        ("/queues/x", "/queues/x", {}),
        ("orders/{region}/raw", "orders/eu/raw", {"region": "eu"}),
        ("orders/{region}/raw", "orders//raw", None),
        ("orders/{region}/raw", "orders/eu/raw/x", None),
        ("orders/{region}/raw", "orders/eu/north/raw", None),
        ("orders/{region}/raw", "orders/eu", None),
        ("orders/{region}/raw", "orders/{region}/raw", {"region": "{region}"}),
        ("{a}", "x", {"a": "x"}),
        ("{a}", "", None),
        ("{a}", "x/y", None),
        ("{a}/{b}", "x/y", {"a": "x", "b": "y"}),
        ("pre-{a}-post", "pre-x-post", {"a": "x"}),
        ("pre-{a}-post", "pre--post", None),
        ("pre-{a}-post", "pre-post", None),
        ("a{x}a", "aa", None),
        ("a{x}a", "aaa", {"x": "a"}),
        ("files/{path:rest}", "files/a", {"path": "a"}),
        ("files/{path:rest}", "files/a/b/c", {"path": "a/b/c"}),
        ("files/{path:rest}", "files/", None),
        ("files/{path:rest}", "files", None),
        ("files/{path:rest}", "files//", {"path": "/"}),
        ("v{path:rest}", "v1/x", {"path": "1/x"}),
        ("v{path:rest}", "w1/x", None),
        ("{{a}}", "{a}", {}),
        ("{{{a}}}", "{x}", {"a": "x"}),
        ("a.*+?[b]|$^", "a.*+?[b]|$^", {}),
        ("a.*/{x}", "abc/1", None),
        ("é/{naïve}", "é/ü", {"naïve": "ü"}),
    ],
)
def test_patterns(pattern: str, address: str, captures: dict[str, str] | None) -> None:
    assert Pattern(pattern).match(address) == captures


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("", "an address must not be empty"),
        ("a/{b", "'a/{b': the { at character 3 is not closed"),
        ("a/{b/c}", "'a/{b/c}': the { at character 3 is not closed"),
        ("a}b", "'a}b': the } at character 2 was not opened"),
        ("{}", "'{}': '' is no name for a capture"),
        ("{a b}", "'{a b}': 'a b' is no name for a capture"),
        ("{class}", "'{class}': 'class' is no name for a capture"),
        ("{a:int}", "'{a:int}': 'int' is no kind of capture, there is only ':rest'"),
        ("{a:}", "'{a:}': '' is no kind of capture, there is only ':rest'"),
        ("{a}{b}", "'{a}{b}': a second capture before the next slash"),
        ("{a}/{a}", "'{a}/{a}': {a} is captured twice"),
        ("{a:rest}/x", "'{a:rest}/x': {a:rest} must be at the end"),
        ("{a:rest}x", "'{a:rest}x': {a:rest} must be at the end"),
    ],
)
def test_what_is_no_pattern(pattern: str, said: str) -> None:
    with pytest.raises(AddressError) as caught:
        Pattern(pattern)
    assert caught.value.description == said
    assert isinstance(caught.value, ValueError)
    with pytest.raises(AddressError):
        AddressTable[int]().add(pattern, 1)


def test_a_pattern_says_what_it_captures() -> None:
    pattern = Pattern("a/{x}/b-{y}/{z:rest}")
    assert pattern.captures == ("x", "y", "z")
    assert (pattern.literal, pattern.text) == (None, "a/{x}/b-{y}/{z:rest}")
    assert (Pattern("a/{{b").literal, Pattern("a").captures) == ("a/{b", ())
    assert repr(pattern) == "Pattern('a/{x}/b-{y}/{z:rest}')"


plain_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(plain_text)
@example("{")
@example("a{b}c/}")
def test_any_address_can_be_written_as_a_pattern(address: str) -> None:
    pattern = Pattern(address.replace("{", "{{").replace("}", "}}"))
    assert pattern.literal == address
    assert pattern.match(address) == {}


@given(plain_text, plain_text)
def test_any_text_is_a_pattern_or_a_fault(pattern: str, address: str) -> None:
    try:
        Pattern(pattern).match(address)
    except AddressError:
        pass


@pytest.mark.slow
@given(st.lists(plain_text.filter(lambda text: "/" not in text), min_size=1, max_size=4))
def test_captures_give_back_what_was_put_in(parts: list[str]) -> None:
    names = [f"n{index}" for index in range(len(parts))]
    pattern = Pattern("/".join(f"x{{{name}}}y" for name in names))
    address = "/".join(f"x{part}y" for part in parts)
    assert pattern.match(address) == dict(zip(names, parts, strict=True))


@pytest.mark.parametrize(
    ("wildcard", "address", "fits"),
    [
        ("orders-*", "orders-1", True),
        ("orders-*", "orders-", True),
        ("orders-*", "orders-a/b", True),
        ("orders-*", "orders", False),
        ("*", "", True),
        ("*", "anything", True),
        ("*-dead", "x-dead", True),
        ("*-dead", "x-dead-", False),
        ("a*b*c", "abc", True),
        ("a*b*c", "a-b-b-c", True),
        ("a*b*c", "acb", False),
        ("a*a", "a", False),
        ("a*a", "aa", True),
        ("a**b", "ab", True),
        ("*ab*ab*", "ab", False),
        ("*ab*ab*", "abab", True),
        ("a", "a", True),
        ("a", "b", False),
        ("a.c-*", "abc-", False),
        ("[ab]-*", "a-", False),
    ],
)
def test_wildcards(wildcard: str, address: str, fits: bool) -> None:
    table: Wildcards[int] = Wildcards()
    table.add(wildcard, 1)
    assert table.find(address) == (1 if fits else None)
    assert list(table) == [wildcard]


def test_a_hostile_address_costs_no_more_than_its_length() -> None:
    # With backtracking this would take longer than the universe has.
    table: Wildcards[int] = Wildcards()
    table.add("a*" * 200 + "b", 1)
    assert table.find("a" * 100_000) is None
    assert Pattern("{a}/{b}/{c:rest}").match("/" * 100_000) is None
    assert Pattern("{a}/x").match("/" * 100_000) is None


# --- Tables ---


@pytest.mark.req("A1")
@pytest.mark.parametrize("order", [*itertools.permutations(range(5))])
def test_the_most_specific_pattern_wins(order: tuple[int, ...]) -> None:
    patterns = [
        "orders/eu/raw",
        "orders/{r}/raw",
        "orders/{r}/{k}",
        "orders/{all:rest}",
        "{x:rest}",
    ]
    table: AddressTable[str] = AddressTable()
    for index in order:
        table.add(patterns[index], patterns[index])

    assert table.find("orders/eu/raw") == ("orders/eu/raw", {})
    assert table.find("orders/us/raw") == ("orders/{r}/raw", {"r": "us"})
    assert table.find("orders/us/new") == ("orders/{r}/{k}", {"r": "us", "k": "new"})
    assert table.find("orders/us/new/1") == ("orders/{all:rest}", {"all": "us/new/1"})
    assert table.find("other") == ("{x:rest}", {"x": "other"})
    assert table.find("") is None
    assert len(table) == 5
    assert repr(table) == "AddressTable(1 addresses, 4 patterns)"


@pytest.mark.req("B19")
def test_most_literal_characters_win_among_wildcards() -> None:
    table: Wildcards[str] = Wildcards()
    for text in ("*", "orders-*", "orders-eu-*", "*-dead", "orders-eu-1"):
        table.add(text, "replaced")
        table.add(text, text)

    for address, winner in [
        ("orders-1", "orders-*"),
        ("orders-eu-2", "orders-eu-*"),
        ("orders-eu-1", "orders-eu-1"),
        ("orders-dead", "orders-*"),
        ("news-dead", "*-dead"),
        ("news", "*"),
    ]:
        assert table.find(address) == winner


def test_of_two_equally_specific_patterns_the_first_wins() -> None:
    table: AddressTable[int] = AddressTable()
    table.add("{a}-x", 1)
    table.add("x-{a}", 2)
    assert table.find("x-x") == (1, {"a": "x"})
    table.add("{a}/{b}", 3)
    table.add("{all:rest}/"[:-1], 4)
    assert table.find("1/2") == (3, {"a": "1", "b": "2"})


@pytest.mark.req("A17")
def test_addresses_come_and_go() -> None:
    table: AddressTable[int] = AddressTable()
    table.add("a/{x}", 1)
    table.add("a", 2)
    for again in ("a/{y}", "a"):
        with pytest.raises(AddressError, match="is taken already"):
            table.add(again, 9)

    table.remove("a/{anything}")
    assert (table.find("a/1"), table.find("a")) == (None, (2, {}))
    table.remove(Pattern("a"))
    table.remove("a")

    assert (table.find("a"), len(table)) == (None, 0)


def test_literal_addresses_may_look_like_patterns() -> None:
    table: AddressTable[int | None] = AddressTable()
    table.add("a/{{x}}", 1)
    assert table.find("a/{x}") == (1, {})
    assert table.find("a/b") is None
    table.remove("a/{{x}}")
    table.add("nothing", None)
    assert table.find("nothing") == (None, {})


# --- Addresses of nodes ---


@pytest.mark.parametrize(
    ("address", "node"),
    [
        ("q1", "q1"),
        ("/queues/q1", "q1"),
        ("/queues/a%2Fb", "a/b"),
        ("/queues/%ff", "/queues/%ff"),
        ("/queues/", "/queues/"),
        ("", ""),
        ("amqps://host:5671/q1", "q1"),
        ("amqp://host/q1/Subscriptions/s1/", "q1/Subscriptions/s1"),
        ("SB://localhost:5699/q1", "q1"),
        ("sb://ns/q1?x=y", "q1"),
        ("sb://ns/q1#frag", "q1"),
        ("amqp://host/a%20b", "a b"),
        ("amqp://host/%ff", "%ff"),
        ("amqp://host", ""),
        ("amqp://host/", ""),
        ("http://host/q1", "http://host/q1"),
        ("a://b", "a://b"),
        ("amqp:q1", "amqp:q1"),
    ],
)
def test_whole_uris_are_addresses_too(address: str, node: str) -> None:
    assert address_of(address) == node


# --- URLs ---


@pytest.mark.req("L1", "L3", "L4")
@pytest.mark.parametrize(
    ("text", "fields", "shown"),
    [
        ("amqp://host", {"host": "host", "port": 5672}, "amqp://host:5672"),
        (" host ", {"scheme": "amqp", "host": "host"}, "amqp://host:5672"),
        ("u:p@host:1/v", {"user": "u", "password": "p"}, "amqp://u@host:1/v"),
        ("AMQPS://Host:1/", {"host": "Host", "port": 1}, "amqps://Host:1"),
        ("amqps://127.0.0.1", {"host": "127.0.0.1", "port": 5671}, "amqps://127.0.0.1:5671"),
        ("sb://ns.example", {"host": "ns.example", "port": 5671}, "sb://ns.example:5671"),
        ("sb://ns/queue", {"virtual_host": None}, "sb://ns:5671/queue"),
        ("ws://h:8080/amqp", {"host": "h", "port": 8080, "path": "/amqp"}, "ws://h:8080/amqp"),
        ("wss://h", {"host": "h", "port": 443}, "wss://h:443"),
        ("amqp://[::1]:9", {"host": "::1", "port": 9}, "amqp://[::1]:9"),
        ("amqp://[fe80::1%25eth0]", {"host": "fe80::1%eth0"}, "amqp://[fe80::1%eth0]:5672"),
        (
            "amqp://user:pa%2Fss%40@host:1/v%2Fh",
            {"user": "user", "password": "pa/ss@", "path": "", "virtual_host": "v/h"},
            "amqp://user@host:1/v/h",
        ),
        ("amqp://user@host", {"user": "user", "password": None}, "amqp://user@host:5672"),
        ("amqp://user:@host", {"user": "user", "password": ""}, "amqp://user@host:5672"),
        ("amqp://host?vhost=a%26b", {"virtual_host": "a&b"}, "amqp://host:5672/a&b"),
        ("amqp://host/?vhost=v", {"virtual_host": "v"}, "amqp://host:5672/v"),
        ("amqp://host", {"virtual_host": None}, "amqp://host:5672"),
        ("ws://host/amqp?vhost=v", {"virtual_host": "v", "path": "/amqp"}, "ws://host:80/amqp"),
        ("amqp+unix:///run/a.sock", {"path": "/run/a.sock", "host": ""}, "amqp+unix:///run/a.sock"),
        (
            "amqp+unix://u:p@/a%20b?vhost=v",
            {"path": "/a b", "user": "u", "password": "p", "virtual_host": "v"},
            "amqp+unix://u@/a b",
        ),
        ("memory://shop", {"host": "shop", "port": 0}, "memory://shop"),
    ],
)
def test_urls(text: str, fields: dict[str, Any], shown: str) -> None:
    url = parse_url(text)
    for name, value in fields.items():
        assert getattr(url, name) == value
    assert str(url) == shown
    assert repr(url) == f"Url({shown!r})"
    assert url.tls is (url.scheme in ("amqps", "sb", "wss"))


def test_urls_to_listen_on() -> None:
    assert str(parse_url("amqps://:5671", listening=True)) == "amqps://:5671"
    assert parse_url("amqp://*:5671", listening=True).host == "*"
    assert parse_url("amqp://127.0.0.1:0", listening=True).port == 0
    with pytest.raises(ConnectFailed, match="has no user"):
        parse_url("amqp://u:p@:5672", listening=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "amqp://: it has no host"),
        ("amqp://", "amqp://: it has no host"),
        ("amqp://*", "amqp://*: it has no host"),
        ("http://host", "http://host: there is no such scheme; there are amqp, amqps, sb, "),
        ("amqp://u:hunter2@host:x", "amqp://***@host: the port is no number up to 65535"),
        ("amqp://host:hunter2", "amqp://host: the port is no number up to 65535"),
        ("u:hunter2", "amqp://u: the port is no number"),
        ("amqp://host:65536", "amqp://host: the port is no number"),
        ("amqp://host:-1", "amqp://host: the port is no number"),
        ("amqp://host:", "amqp://host: the port is no number"),
        ("amqp://host:٣", "amqp://host: the port is no number"),
        ("amqp://host:0", "amqp://host: port 0 is for listening only"),
        ("amqp://u:hunter/2@host", "amqp://***@host: an '@' after the host; in a user name"),
        ("amqp://u:hunter?2@host", "amqp://***@host: an '@' after the host; in a user name"),
        ("amqp://u:hunter@2@host", "amqp://***@host: an '@' in a user name or password is"),
        ("amqp://u:hunter#2@host", "amqp://***@host: '#' is written as %23"),
        ("amqp://u:hunter:2@host", "amqp://***@host: a ':' in a password is written as %3A"),
        ("amqp://u:hunter%2@host", "amqp://***@host: a '%' in the password is written as %25"),
        ("amqp://u%:hunter2@host", "amqp://***@host: a '%' in the user name is written as %25"),
        (
            "amqp://u:%ff@host",
            "amqp://***@host: the percent-encoded characters in the password are not UTF-8",
        ),
        ("amqp://:hunter2@host", "amqp://***@host: there is no user name before '@'"),
        ("amqp://host/%zz", "amqp://host: a '%' in the path is written as %25"),
        ("amqp://host/a b", "a URL: a space or control character at character 14"),
        ("amqp://ho\nst", "a URL: a space or control character at character 10"),
        ("amqp://a,b", "amqp://a,b: the host has characters that no host name has"),
        ("amqp://::1", "amqp://: an IPv6 address is written in brackets: [::1]"),
        ("amqp://[::1", "amqp://[::1]: between '[' and ']'"),
        ("amqp://[host]", "amqp://[host]: between '[' and ']' stands no IPv6 address"),
        ("amqp://[::1]x", "amqp://[::1]: after the brackets comes ':' and the port"),
        ("amqp://host?hunter2", "amqp://host: after '?' there is nothing but vhost=NAME"),
        ("amqp://host?vhost", "amqp://host: after '?' there is nothing but vhost=NAME"),
        ("amqp://host?vhost=a&vhost=b", "amqp://host: after '?' there is nothing but"),
        ("amqp://host?vhost=%", "amqp://host: a '%' in the virtual host is written as %25"),
        ("amqp://host/a?vhost=b", "amqp://host: the virtual host is given twice"),
        ("amqp+unix://run/a", "amqp+unix://run: a Unix socket is amqp+unix:///PATH"),
        ("amqp+unix:///", "amqp+unix://: a Unix socket is amqp+unix:///PATH"),
        ("memory://", "memory://: it is memory://NAME"),
        ("memory://a/b", "memory://a: it is memory://NAME"),
        ("memory://a:1", "memory://a: memory has no ports"),
    ],
)
def test_what_is_wrong_with_a_url_is_said_without_its_password(text: str, said: str) -> None:
    with pytest.raises(ConnectFailed) as caught:
        parse_url(text)
    assert caught.value.description.startswith(said)
    assert caught.value.condition == "amqp:invalid-field"
    assert "hunter" not in caught.value.description
    assert len(caught.value.description) < 250


def test_several_urls_are_tried_in_turn() -> None:
    both = ["amqp://a", "amqps://b:1"]
    for urls in (both, ",".join(both), ", ".join(both), iter(both), map(parse_url, both)):
        assert [str(url) for url in parse_urls(urls)] == ["amqp://a:5672", "amqps://b:1"]
    assert parse_urls(parse_url("amqp://a"))[0].host == "a"
    assert parse_urls("amqp://u:a,b@host")[0].password == "a,b"
    assert len(parse_urls(["amqp://a,amqp://b", "amqp://c"])) == 3


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ([], "there is no URL to connect to"),
        ("", "there is no URL to connect to"),
        ("amqp://a,amqp://b:x", "URL 2 of 2: amqp://b: the port is no number up to 65535"),
        (["amqp://u:hunter2@a", "b:c"], "URL 2 of 2: amqp://b: the port"),
        ("amqp://a,b", "amqp://a,b: the host has characters"),
    ],
)
def test_which_of_several_urls_is_wrong(urls: Any, said: str) -> None:
    with pytest.raises(ConnectFailed) as caught:
        parse_urls(urls)
    assert caught.value.description.startswith(said)


@pytest.mark.slow
@given(st.text(max_size=40) | st.text("amqp:/@[]%?#=&,.s0 ", max_size=30).map("amqp://".__add__))
def test_any_text_is_a_url_or_a_fault(text: str) -> None:
    for listening in (False, True):
        try:
            url = parse_url(text, listening=listening)
        except ConnectFailed:
            continue
        assert isinstance(url, Url)
        assert str(url)


characters = st.characters(exclude_categories=["Cs"])


@given(st.text(characters, min_size=1, max_size=20), st.text(characters, max_size=20))
def test_any_user_and_password_can_be_encoded_and_the_password_never_shows(
    user: str, password: str
) -> None:
    url = parse_url(f"amqp://{quote(user, safe='')}:{quote(password, safe='')}@host")
    assert (url.user, url.password) == (user, password)
    assert str(url) == f"amqp://{user}@host:5672"
    assert repr(url) == f"Url({str(url)!r})"


# --- Web pages ---


@pytest.mark.req("L2")
@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://a.example", "https://a.example"),
        ("HTTPS://A.Example:443/", "https://a.example"),
        ("http://127.0.0.1:080", "http://127.0.0.1"),
        ("https://[::1]:8443", "https://[::1]:8443"),
        ("capacitor://localhost", "capacitor://localhost"),
    ],
)
def test_origins_are_as_browsers_write_them(text: str, origin: str) -> None:
    assert origin_of(text) == origin


@pytest.mark.req("L2")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "*",
        "null",
        "a.example",
        "https://",
        "https://a/b",
        "https://a?b",
        "https://u@a",
        "https://b\u00fc",
        "https://a:x",
    ],
)
def test_texts_that_no_browser_sends_are_no_origins(text: str) -> None:
    with pytest.raises(AddressError, match="is no origin of pages"):
        origin_of(text)
