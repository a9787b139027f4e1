"""Files in TOML: an error gives the line of the mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from msgspec import Struct

from amqp_rt.config_files import SettingsError, Where, line_of, parse_settings, read_settings


class Inner(Struct, forbid_unknown_fields=True):
    name: str
    kind: Literal["queue", "topic"] = "queue"
    sizes: list[int] = []


class Outer(Struct, forbid_unknown_fields=True):
    title: str = ""
    node: list[Inner] = []
    by_name: dict[str, Inner] = {}


GOOD = """
title = "x"

[[node]]
name = "a"

[[node]]
name = "b"
kind = "topic"
sizes = [
    1,
    2,
]

[by_name.c]
name = "c"
"""


def test_what_is_right_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(GOOD)
    found, text = read_settings(file, Outer)
    assert text == GOOD
    assert [each.name for each in found.node] == ["a", "b"]
    assert found.by_name["c"].kind == "queue"


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ('title = "x"', 'titel = "x"', "line 2: there is no 'titel' here; did you mean 'title'?"),
        ('title = "x"', "zzzzz = 1", "line 2: there is no 'zzzzz' here"),
        ('name = "b"', 'nmae = "b"', "line 8: there is no 'nmae' here; did you mean 'name'?"),
        ('"topic"', '"topci"', "line 9: 'topci' is not known here; did you mean 'topic'?"),
        ("    2,", "    true,", "line 10: expected `int`, got `bool`"),
        ('name = "c"', "name = 3", "line 16: expected `str`, got `int`"),
        ('name = "a"', 'kind = "queue"', "line 4: object missing required field `name`"),
        ('title = "x"', "title = ", "line 2: Invalid value"),
        ("[by_name.c]", "[by_name.c", "line 15: "),
        ('name = "c"', 'name = "', "line 16: "),
    ],
)
def test_a_mistake_has_its_line(right: str, wrong: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(GOOD.replace(right, wrong), Outer, "x.toml")
    assert f"x.toml, {sentence}" in str(caught.value)


NESTED = """
top = 1
[[fleet]]
name = "a"
[[fleet.ship]]
sails = 3
[[fleet.ship]]
sails = 4
[[fleet]]
[[fleet.ship]]
sails = 5
["quoted.name" . plain]  # with a comment
"a = b" = 1
inline = { deep = { deeper = 1 } }
dotted.key = 2
[many]
sizes = [
  "x = 1",
  [1],
]
"""


@pytest.mark.parametrize(
    ("where", "line"),
    [
        (("top",), 2),
        (("fleet", 0, "name"), 4),
        (("fleet", 0, "ship", 1, "sails"), 8),
        (("fleet", 1), 9),
        (("fleet", 1, "ship", 0, "sails"), 11),
        (("fleet", None, "ship", 1), 7),
        (("quoted.name", "plain", "a = b"), 13),
        (("quoted.name", "plain", "inline", "deep", "deeper"), 14),
        (("quoted.name", "plain", "dotted"), 15),
        (("quoted.name", "plain", "nothing"), 12),
        (("many", "sizes", 1), 17),
        (("nothing",), 1),
        ((), 1),
    ],
)
def test_the_line_of_a_key(where: Where, line: int) -> None:
    assert line_of(NESTED, where) == line


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*none\.toml: No such file"):
        read_settings(tmp_path / "none.toml", Outer)
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="it is not UTF-8"):
        read_settings(bad, Outer)


@pytest.mark.parametrize("value", ["[" * 5_000, "{ a = " * 5_000])
def test_values_that_are_nested_too_deeply_are_refused(tmp_path: Path, value: str) -> None:
    deep = tmp_path / "deep.toml"
    deep.write_text(f"[outer]\ninner = {value}")
    with pytest.raises(SettingsError, match=r"deep\.toml: its values are nested too deeply"):
        read_settings(deep, Outer)
