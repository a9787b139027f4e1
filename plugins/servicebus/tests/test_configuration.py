"""Configuration files: TOML and the emulators' JSON give the same declarations; mistakes have a line."""

from __future__ import annotations

from pathlib import Path

import pytest
from amqp_rt_servicebus.configuration import SIZE_MAX, parse_toml, read_configuration
from amqp_rt_servicebus.declarations import (
    Correlation,
    Hub,
    Queue,
    Rule,
    SasKey,
    Sql,
    Subscription,
    Topic,
)
from amqp_rt_servicebus.emulators import parse_emulator

from amqp_rt.config_files import SettingsError

TOML = """\
[queues.orders]
lock_duration = "PT30S"
max_delivery_count = 3
forward_to = ""

[topics.prices]
default_message_time_to_live = 3600

[topics.prices.subscriptions.eu]
requires_session = true

[topics.prices.subscriptions.eu.rules.eu]
sql = "region = @region"
parameters = { "@region" = "eu" }
action = "SET seen = 1"

[topics.prices.subscriptions.eu.rules.label]
correlation = { label = "eu", properties = { weight = 3 } }

[topics.prices.subscriptions.all]

[hubs.clicks]
partitions = 4
consumer_groups = ["audit"]

[keys.app]
key = "secret"
rights = ["Send"]
"""

EMULATOR = """\
{
  "UserConfig": {
    "Namespaces": [
      {
        "Name": "sbemulatorns",
        "Queues": [
          {
            "Name": "orders",
            "Properties": {
              "DeadLetteringOnMessageExpiration": false,
              "ForwardDeadLetteredMessagesTo": "",
              "ForwardTo": "",
              "LockDuration": "PT30S",
              "MaxDeliveryCount": 3,
              "RequiresSession": false
            }
          }
        ],
        "Topics": [
          {
            "Name": "prices",
            "Properties": {"DefaultMessageTimeToLive": "PT1H"},
            "Subscriptions": [
              {
                "Name": "eu",
                "Properties": {"RequiresSession": true},
                "Rules": [
                  {
                    "Name": "eu",
                    "Properties": {
                      "FilterType": "Sql",
                      "SqlFilter": {"SqlExpression": "region = 'eu'"},
                      "Action": {"SqlExpression": "SET seen = 1"}
                    }
                  },
                  {
                    "Name": "label",
                    "Properties": {
                      "FilterType": "Correlation",
                      "CorrelationFilter": {"Label": "eu", "Properties": {"weight": "3"}}
                    }
                  }
                ]
              },
              {"Name": "all"}
            ]
          }
        ]
      }
    ],
    "Logging": {"Type": "File"}
  }
}
"""

HUBS = """\
{
  "UserConfig": {
    "NamespaceConfig": [
      {
        "Type": "EventHub",
        "Name": "emulatorNs1",
        "Entities": [
          {"Name": "eh1", "PartitionCount": "2", "ConsumerGroups": [{"Name": "cg1"}]},
          {"Name": "eh2", "PartitionCount": 3}
        ]
      }
    ],
    "LoggingConfig": {"Type": "File"}
  }
}
"""


def test_toml() -> None:
    found = parse_toml(TOML)
    assert found.declarations == (
        Queue("orders", lock_duration=30, max_delivery_count=3),
        Topic(
            "prices",
            [
                Subscription(
                    "eu",
                    [
                        Rule(
                            "eu",
                            Sql("region = @region", {"@region": "eu"}),
                            action="SET seen = 1",
                        ),
                        Rule("label", Correlation(label="eu", properties={"weight": 3})),
                    ],
                    requires_session=True,
                ),
                Subscription("all"),
            ],
            default_message_time_to_live=3600,
        ),
        Hub("clicks", partitions=4, consumer_groups=["audit"]),
    )
    assert found.keys == {"app": SasKey("secret", ("Send",))}


def test_a_file_of_the_service_bus_emulator() -> None:
    assert parse_emulator(EMULATOR) == [
        Queue("orders", lock_duration=30, max_delivery_count=3),
        Topic(
            "prices",
            [
                Subscription(
                    "eu",
                    [
                        Rule("eu", "region = 'eu'", action="SET seen = 1"),
                        Rule("label", Correlation(label="eu", properties={"weight": "3"})),
                    ],
                    requires_session=True,
                ),
                Subscription("all"),
            ],
            default_message_time_to_live=3600,
        ),
    ]


def test_a_file_of_the_event_hubs_emulator() -> None:
    assert parse_emulator(HUBS) == [
        Hub("eh1", partitions=2, consumer_groups=["cg1"]),
        Hub("eh2", partitions=3),
    ]


def test_files_are_told_apart_by_their_names(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "bus.toml", tmp_path / "Config.JSON"
    ours.write_text(TOML)
    # Editors on Windows begin files with a byte order mark.
    theirs.write_text(EMULATOR, "utf-8-sig")
    assert read_configuration(ours).declarations[0] == read_configuration(theirs).declarations[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lock_duration", "lockduration", "line 2: there is no 'lockduration' here; did you mean"),
        ('"PT30S"', '"soon"', "line 2: queue 'orders': lock_duration: 'soon' is not an ISO"),
        ("= 3\n", "= 0\n", "line 3: queue 'orders': max_delivery_count is less than 1"),
        ("= 3\n", "= true\n", "line 3: expected `int"),
        ("[queues.orders]", '[queues."a b"]', "line 1: queue 'a b'"),
        ("sql =", "label =", "line 13: there is no 'label' here"),
        ("action =", "correlation = {}\naction =", "line 12: a rule has sql or correlation"),
        ("{ label", "{ labelled", "line 18: there is no 'labelled' here; did you mean 'label'"),
        ("= 4\n", "= 0\n", "line 23: hub 'clicks': partitions is 0"),
        ('["Send"]', '["Sent"]', "line 28: 'Sent' is not known here; did you mean 'Send'"),
        ("[keys.app]", "[keys.app", "line 26: "),
    ],
)
def test_a_mistake_in_toml_has_its_line(old: str, new: str, said: str) -> None:
    assert TOML.count(old) >= 1
    with pytest.raises(SettingsError) as caught:
        parse_toml(TOML.replace(old, new, 1), "bus.toml")
    assert str(caught.value).startswith(f"bus.toml, {said}"), caught.value


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"LockDuration"', '"LockDurration"', ", line 13: there is no 'LockDurration' here"),
        ('"PT30S"', '"soon"', ", line 13: queue 'orders': lock_duration: 'soon'"),
        ('"PT30S"', "true", ", line 13: expected `float | str`"),
        ('Count": 3', 'Count": 0', ", line 14: queue 'orders': max_delivery_count"),
        ('"Name": "orders"', '"Name": "a b"', ", line 8: queue 'a b'"),
        ('"Sql",', '"Sequel",', ", line 31: rule 'eu': FilterType is 'Sequel'"),
        ('"Correlation",', '"Sql",', ", line 39: rule 'label': FilterType is Sql, and there is no"),
        ('"Logging"', '"Logs"', ", line 51: there is no 'Logs' here"),
        ('"Namespaces": [', '"Namespaces": ', ", line 50: expecting"),
        ('"orders",', '"orders"', ", line 9: expecting ',' delimiter"),
        ("{", "[" * 100_000 + "{", ": its values are nested too deeply"),
    ],
)
def test_a_mistake_in_json_has_its_line(old: str, new: str, said: str) -> None:
    assert EMULATOR.count(old) >= 1
    with pytest.raises(SettingsError) as caught:
        parse_emulator(EMULATOR.replace(old, new, 1), "Config.json")
    assert str(caught.value).startswith(f"Config.json{said}"), caught.value


def test_a_number_of_partitions_is_one() -> None:
    with pytest.raises(SettingsError, match=r"Config.json, line 8: PartitionCount is no number"):
        parse_emulator(HUBS.replace('"2"', '"two"'), "Config.json")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "bus.toml"
    with pytest.raises(SettingsError, match="No such file"):
        read_configuration(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not UTF-8"):
        read_configuration(path)
    path.write_bytes(b"#" * (SIZE_MAX + 1))
    with pytest.raises(SettingsError, match=f"more than {SIZE_MAX} bytes"):
        read_configuration(path)
