"""Limits and tokens on the command line and in the file of ``--config``: every one can be set."""

from __future__ import annotations

import json
import subprocess
import sys
from math import inf, nan
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import fields

from amqp_rt.broker.lifecycles import LifeCycles
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.cli import main
from amqp_rt.cli.configured import ConfiguredCommand
from amqp_rt.cli.limit_options import CbsTable, LimitsTable, cbs_of, limit_value, limits_of
from amqp_rt.container.container import Container
from amqp_rt.container.recovery import Reconnect
from amqp_rt.container.tokens import Sas
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.security.jwts import Jwt
from amqp_rt.security.tokens import BearerToken, Cbs

SECRET = "a secret of at least 32 octets, for HS256"
FIELDS = {field.name: field.default for field in fields(Limits)}


def given(*arguments: str) -> tuple[Limits, Cbs | None]:
    """What a command that has these options makes of them."""
    found: list[Any] = []

    @click.command(cls=ConfiguredCommand, tables={"limits": LimitsTable, "cbs": CbsTable})
    @click.option("--limit", multiple=True)
    @click.option("--cbs", "tokens", multiple=True)
    @click.pass_context
    def command(context: click.Context, limit: tuple[str, ...], tokens: tuple[str, ...]) -> None:
        limits = limits_of(context, limit)
        found.append((limits, cbs_of(context, tokens, limits)))

    done = CliRunner().invoke(command, list(arguments), standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    result: tuple[Limits, Cbs | None] = found[0]
    return result


def other(name: str) -> int | float:
    """A value of a limit that is not its default."""
    return 20 if name == "delivery_tag_max" else FIELDS[name] + 1


@pytest.mark.parametrize("name", FIELDS)
def test_every_limit_can_be_set(name: str, tmp_path: Path) -> None:
    config = tmp_path / "broker.toml"
    config.write_text(f"[limits]\n{name} = {other(name)}\n")
    wanted = Limits(**{name: other(name)})  # type: ignore[arg-type]
    assert given("--limit", f"{name}={other(name)}")[0] == wanted
    assert given("--config", str(config))[0] == wanted
    # The command line goes before, and the other limits of the file stay.
    more = "leases_max" if name != "leases_max" else "stages_max"
    config.write_text(f"[limits]\n{name} = {other(name)}\n{more} = 7\n")
    both, _ = given("--config", str(config), "--limit", f"{name}={FIELDS[name]}")
    assert getattr(both, name) == FIELDS[name]
    assert getattr(both, more) == 7


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("message_size_max", "64MiB", 64 * 2**20),
        ("message_size_max", "1.5 KiB", 1536),
        ("broker_bytes_max", "2GiB", 2 * 2**30),
        ("handshake_s", "2.5", 2.5),
        ("handshake_s", 3, 3),
    ],
)
def test_units(name: str, text: object, value: float) -> None:
    assert limit_value(name, text) == value


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("idle_timeout=3", "there is no limit 'idle_timeout'; did you mean 'idle_timeout_s'?"),
        ("foo=3", "there is no limit 'foo'; 'amqp-rt limits' lists all"),
        ("idle_timeout_s", "'idle_timeout_s' is not NAME=VALUE, such as idle_timeout_s=30"),
        ("idle_timeout_s=ten", "idle_timeout_s must be a number, got 'ten'"),
        ("idle_timeout_s=10s", "idle_timeout_s must be a number, got '10s'"),
        ("idle_timeout_s=nan", "idle_timeout_s must be a number of seconds from 0.0 to 4294967"),
        ("stage_s=inf", "stage_s must be a number of seconds from 0 to 10000000000.0, got inf"),
        ("stage_s=-1", "stage_s must be a number of seconds from 0 to 10000000000.0, got -1"),
        ("channel_max=1.5", "channel_max must be a whole number from 0 to 65535, got 1.5"),
        ("channel_max=65536", "channel_max must be a whole number from 0 to 65535, got 65536"),
        ("frame_size_max=511", "frame_size_max must be a whole number from 512 to"),
        ("nodes_max=-1", "nodes_max must be a whole number from 0 to"),
    ],
)
def test_a_wrong_limit_is_named(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter) as caught:
        given("--limit", text)
    assert sentence in caught.value.message
    assert caught.value.param_hint == "--limit"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[limits]\nidle_timeout = 3", "line 2: there is no 'idle_timeout' here; did you mean"),
        ("[limits]\nleases_max = 1\nchannel_max = 1.5", "line 3: channel_max must be a whole"),
        ("[limits]\nstage_s = nan", "line 2: stage_s must be a number of seconds"),
        ("[limits]\nstage_s = true", "line 2: expected `int | float | str | null`, got `bool`"),
        (
            "[cbs.jwt]\naudience = 'a'\nisuer = 'b'",
            "line 3: there is no 'isuer' here; did you mean",
        ),
    ],
)
def test_a_wrong_limit_of_a_file_has_its_line(text: str, sentence: str, tmp_path: Path) -> None:
    config = tmp_path / "broker.toml"
    config.write_text(text)
    with pytest.raises(click.UsageError) as caught:
        given("--config", str(config))
    assert f"{config}, {sentence}" in caught.value.message


CBS_TABLE = """
[cbs.sas]
app = "a key"

[cbs.sas.reports]
keys = ["one", "two"]
rights = ["listen"]
address = "reports"

[cbs.jwt]
audience = ["shop", "store"]
issuer = "i"
secret = "@KEY"
leeway_s = 2
refresh_s = 60

[cbs.swt]
key = "k"
issuer = "i"
"""


def test_every_field_of_cbs_can_be_set(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(SECRET + "\n")
    config = tmp_path / "broker.toml"
    config.write_text(CBS_TABLE.replace("KEY", str(tmp_path / "key")))
    _, by_file = given("--config", str(config))
    options = [
        "sas.app=a key",
        *("sas.reports.keys=one", "sas.reports.keys=two"),
        *("sas.reports.rights=listen", "sas.reports.address=reports"),
        *("jwt.audience=shop", "jwt.audience=store", "jwt.issuer=i"),
        *(f"jwt.secret=@{tmp_path / 'key'}", "jwt.leeway_s=2", "jwt.refresh_s=60"),
        *("swt.key=k", "swt.issuer=i"),
    ]
    _, by_options = given(*(part for each in options for part in ("--cbs", each)))
    for cbs in (by_file, by_options):
        assert cbs is not None
        sas = cbs._validators["servicebus.windows.net:sastoken"]._rules  # type: ignore[attr-defined]
        assert sas["app"].keys == ("a key",)
        assert sas["reports"].keys == ("one", "two")
        assert str(sas["reports"].rights) == "listen"
        assert sas["reports"].address == "reports"
        jwt: Any = cbs._validators["jwt"]
        assert jwt._audience == ["shop", "store"]
        assert (jwt._issuer, jwt._leeway_s, jwt._refresh_s) == ("i", 2, 60)
        assert jwt._secret.key == SECRET.encode()
        swt: Any = next(each for kind, each in cbs._validators.items() if "swt" in kind.lower())
        assert (swt._key, swt._issuer) == (b"k", "i")
    assert given() == (DEFAULT_LIMITS, None)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("sas", "'sas' is not NAME=VALUE, such as jwt.audience=shop"),
        ("sass.app=key", "unknown field `sass`"),
        ("sas.app=", "a secret is empty"),
        ("sas.app=@/no/such/file", "cannot read a secret from /no/such/file: No such file"),
        ("jwt.audience=shop", "no key to verify tokens with"),
        ("swt.issuer=i", "missing required field `key`"),
    ],
)
def test_wrong_tokens_are_named(option: str, sentence: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        given("--cbs", option)
    assert sentence in caught.value.message
    assert caught.value.param_hint == "--cbs"


@pytest.mark.parametrize("value", [nan, inf, -inf, 1e300])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: Limits(transaction_s=value),
        lambda value: Queue("q", ttl_s=value),
        lambda value: Queue("q", lock_s=value),
        lambda value: Queue("q", duplicate_window_s=value),
        lambda value: Topic("t", ttl_s=value),
        lambda value: Log("l", max_age_s=value),
        lambda value: LifeCycles(max_age_s=value),
        lambda value: Reconnect(first_delay_s=value),
        lambda value: Reconnect(delay_max_s=value),
        lambda value: Reconnect(factor=value if value < 1e300 else inf),
        lambda value: Jwt(audience="a", secret=SECRET.encode(), leeway_s=value),
        lambda value: Jwt(audience="a", secret=SECRET.encode(), refresh_s=value),
        lambda value: Sas("name", "key", life_s=value),
        lambda value: BearerToken("text", value),
    ],
)
def test_what_is_no_time_is_refused(make: Any, value: float) -> None:
    with pytest.raises(ValueError, match=r"must be|is at least|is more than"):
        make(value)


@pytest.mark.parametrize("value", [nan, -1])
def test_to_wait_for_ever_is_a_time_where_it_has_a_sense(value: float) -> None:
    Reconnect(give_up_after_s=inf)
    Container("c", drain_s=inf)
    with pytest.raises(ValueError, match="give_up_after_s must be 0 to inf seconds"):
        Reconnect(give_up_after_s=value)
    with pytest.raises(ValueError, match="drain_s must be 0 to inf seconds"):
        Container("c", drain_s=value)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["limits_page", "command_line_page"])
def test_a_generated_page_is_up_to_date(tool: str) -> None:
    path = Path(__file__).parents[2] / "docs" / "_tools" / f"{tool}.py"
    if not path.exists():
        pytest.skip("the documentation is not here")
    # In a process of its own: click remembers the names of an option from the first use of its command.
    compare = (
        "import runpy, sys; tool = runpy.run_path(sys.argv[1]);"
        " sys.exit(tool['PAGE'].read_text('utf-8') != tool['page']())"
    )
    done = subprocess.run([sys.executable, "-c", compare, path], check=False)
    assert done.returncode == 0, f"run python docs/_tools/{tool}.py"


def test_limits_are_listed_as_they_are_given() -> None:
    listed = CliRunner().invoke(main, ["limits"])
    assert listed.exit_code == 0
    given = [line.partition("=") for line in listed.output.splitlines()]
    assert {name: limit_value(name, value) for name, _, value in given} == {
        name: getattr(Limits(), name) for name in Limits.__struct_fields__
    }
    written = CliRunner().invoke(main, ["limits", "--json"]).output.splitlines()
    assert [json.loads(line) for line in written] == [
        {"name": name, "default": value if value != inf else "inf"}
        for name, value in FIELDS.items()
    ]
