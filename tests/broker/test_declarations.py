"""Nodes that are written down in a file, and what is said of mistakes in it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from amqp_rt import Broker
from amqp_rt.broker.declarations import declarations_in, declarations_of
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.errors import AmqpError

TOML = """
# what the shop needs
[queues.work]
priorities = 5
dead_letter = "work/dead"

[queues]
"work/dead" = {}
plain = { ttl_s = 5, length_max = 10 }

[topics.prices]
[logs]
clicks.partitions = 3

[virtual_hosts.berlin.queues.work]
"""
YAML = """
# what the shop needs
queues:
  work:
    priorities: 5
    dead_letter: work/dead
  work/dead:
  plain: {ttl_s: 5, length_max: 10}
topics: {prices: }
logs:
  clicks:
    partitions: 3
virtual_hosts:
  berlin:
    queues: {work: {}}
"""
EXPECTED = {
    "": [
        Queue("work", priorities=5, dead_letter="work/dead"),
        Queue("work/dead"),
        Queue("plain", ttl_s=5, length_max=10),
        Topic("prices"),
        Log("clicks", partitions=3),
    ],
    "berlin": [Queue("work")],
}


@pytest.mark.parametrize(("name", "text"), [("nodes.toml", TOML), ("nodes.YAML", YAML)])
def test_a_file_declares_nodes(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text, "utf-8")
    assert declarations_in(file) == EXPECTED


#: A file, and the end of what is said of it; ``FILE`` is its path.
WRONG: list[tuple[str, str, str]] = [
    (
        "a.toml",
        "[queues.a]\n[queues.work]\nlock_s = 1\nprioritys = 5\n",
        "FILE, line 4: work: a queue has no option 'prioritys'; is 'priorities' meant?",
    ),
    ("a.toml", "\n[queue.work]\n", "FILE, line 2: there is no section 'queue'; is 'queues' meant?"),
    (
        "a.toml",
        "# x\nnothing = 3\n",
        "FILE, line 2: there is no section 'nothing': it has queues, topics, logs, schedules, virtual_hosts",
    ),
    ("a.toml", "queues = 3\n", "FILE, line 1: queues is a table of names, not 3"),
    ("a.toml", "[queues]\n\nwork = 3\n", "FILE, line 3: queues.work is a table of names, not 3"),
    (
        "a.toml",
        "[queues]\n# one\nwork = { priorities = 'many' }\n",
        "FILE, line 3: work: Expected `int`, got `str` - at `$.priorities`",
    ),
    ("a.toml", "[queues]\nwork.groups = -1\n", "FILE, line 2: work: groups is 0 to 65536"),
    (
        "a.toml",
        '[logs."a b"]\n"partitions" = 0\n',
        "FILE, line 2: a b: partitions is at least 1, not 0",
    ),
    (
        "a.toml",
        "[queues.work]\nname = 'x'\n",
        "FILE, line 2: the name of a node is set by its section",
    ),
    (
        "a.toml",
        "[queues.work]\n[topics.work]\n",
        "FILE, line 2: 'work' is a node of another kind already",
    ),
    (
        "a.toml",
        "[virtual_hosts.berlin.queues.work]\nttl = 1\n",
        "FILE, line 2: work: a queue has no option 'ttl'; is 'ttl_s' meant?",
    ),
    (
        "a.toml",
        "[virtual_hosts.berlin.virtual_hosts.x]\n",
        "FILE, line 1: there is no section 'virtual_hosts'",
    ),
    (
        "a.toml",
        "[queues.work]\ndead_letter = '''\na\n'''\nlength_max = [\n 3\n]\n",
        "FILE, line 5: work: Expected `int | null`, got `array`",
    ),
    ("a.toml", "[queues.work]\npriorities = \n", "FILE: Invalid value (at line 2, column 14)"),
    (
        "a.yaml",
        "queues:\n  work:\n    lock_s: 1\n    prioritys: 5\n",
        "FILE, line 4: work: a queue has no option 'prioritys'; is 'priorities' meant?",
    ),
    (
        "a.yml",
        "queues:\n  work:\n  - a\n",
        "FILE, line 2: queues.work is a table of names, not ['a']",
    ),
    ("a.yml", "- a\n", "FILE, line 1: a file is a table of names, not ['a']"),
    ("a.yml", "queues:\n  5: {}\n", "FILE, line 2: 5 is no name: put it into quotes"),
    ("a.yml", "queues: {a: &a {b: *a}}\n", "a queue has no option 'b'"),
    ("a.yml", "queues:\n  - {\n", "line 3, column 1"),
    ("a.toml", "[queues.work]\nsort = " + "[" * 5_000, "FILE: its values are nested too deeply"),
    ("a.yml", "queues: " + "[" * 1_000, "FILE: its values are nested too deeply"),
    ("a.json", "{}", "FILE: nodes are declared in a file whose name ends in .toml or .yaml"),
]


@pytest.mark.parametrize(("name", "text", "sentence"), WRONG)
def test_a_mistake_is_said_with_its_line(
    tmp_path: Path, name: str, text: str, sentence: str
) -> None:
    file = tmp_path / name
    file.write_text(text, "utf-8")
    with pytest.raises(AmqpError, match=re.escape(sentence.replace("FILE", str(file)))):
        declarations_in(file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(AmqpError, match=r"none.toml cannot be read: No such file"):
        declarations_in(tmp_path / "none.toml")
    file = tmp_path / "bytes.toml"
    file.write_bytes(b"\xff")
    with pytest.raises(AmqpError, match="is not UTF-8"):
        declarations_in(file)


def test_yaml_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(YAML, "utf-8")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(AmqpError, match=re.escape("pip install 'amqp-rt[yaml]', or write TOML")):
        declarations_in(file)


def test_a_mapping_declares_the_same() -> None:
    assert declarations_of({"queues": {"work": None}, "logs": {}}) == {"": [Queue("work")]}
    with pytest.raises(AmqpError, match=r"^queues.work.x: work: a queue has no option 'x'"):
        declarations_of({"queues": {"work": {"x": 1}}})


async def test_a_broker_makes_what_a_file_declares(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text(TOML, "utf-8")
    async with Broker() as broker:
        await broker.declare_from(file)
        assert broker.nodes() == EXPECTED[""]
        assert broker.nodes(virtual_host="berlin") == EXPECTED["berlin"]
