"""The declared controls, commands and structs against the machine-readable specification."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from amqp_rt_amqp010 import layouts
from amqp_rt_amqp010.layouts import (
    CODED,
    COMMANDS,
    CONTROLS,
    EXCEPTIONS,
    LAYER_OF,
    STRUCTS,
    Command,
    Composite,
    Control,
    Layer,
    Operation,
)
from amqp_rt_amqp010.plans import wire_fields

HERE = Path(__file__).parent
NAME = "amqp.0-10-qpid-errata.stripped.xml"
NAMESPACE = "{http://www.amqp.org/schema/amqp.xsd}"
#: Names that Python, or the other classes, do not leave free.
CLASSES = {"session.header": "SessionHeader"}


def read(path: Path) -> ET.Element:
    root = ET.parse(path).getroot()
    for element in root.iter():
        element.tag = element.tag.replace(NAMESPACE, "")
    return root


SPEC = read(HERE / "specification" / NAME)
GROUPS = SPEC.findall("class")
DOMAINS = {each.attrib["name"]: each.attrib["type"] for each in SPEC.findall("domain")} | {
    f"{group.attrib['name']}.{each.attrib['name']}": each.attrib["type"]
    for group in GROUPS
    for each in group.findall("domain")
}


def wire_type(name: str, group: str) -> str:
    """Follow the domains to a type; arrays of texts are one of ours."""
    while name not in {"str16-array", "amqp-host-array"}:
        if "." not in name and f"{group}.{name}" in DOMAINS:
            name = f"{group}.{name}"
        elif name not in DOMAINS:
            return name
        group = name.partition(".")[0]
        name = DOMAINS[name]
    return "str16-array"


def specified_fields(element: ET.Element, group: str) -> list[tuple[str, str]]:
    return [
        (
            "global_" if each.attrib["name"] == "global" else each.attrib["name"].replace("-", "_"),
            wire_type(each.attrib["type"], group),
        )
        for each in element.findall("field")
    ]


def declared_fields(of: type[Composite]) -> list[tuple[str, str]]:
    return [(name, kind) for name, kind, _ in wire_fields(of)]


def class_of(name: str) -> str:
    last = name.rpartition(".")[2]
    return CLASSES.get(name, "".join(part.capitalize() for part in last.split("-")))


def code_of(element: ET.Element, group: ET.Element) -> int:
    code = element.get("code")
    return int(group.attrib["code"], 0) << 8 | int(code, 0) if code else 0


def operations() -> list[tuple[ET.Element, ET.Element]]:
    return [
        (group, each)
        for group in GROUPS
        for each in (*group.findall("control"), *group.findall("command"))
    ]


def structs() -> list[tuple[ET.Element, ET.Element]]:
    return [(group, each) for group in GROUPS for each in group.iter("struct")]


def title(group: ET.Element, element: ET.Element) -> str:
    return f"{group.attrib['name']}.{element.attrib['name']}"


def test_the_copy_of_the_specification_is_a_copy(shared: Path) -> None:
    theirs = shared / "spec" / "amqp-0-10" / NAME
    assert (HERE / "specification" / NAME).read_bytes() == theirs.read_bytes()


def test_nothing_is_declared_that_is_not_specified() -> None:
    assert (len(CONTROLS), len(COMMANDS), len(STRUCTS)) == (25, 59, 17)
    assert len(operations()) == len(CONTROLS) + len(COMMANDS)
    assert len(structs()) == len(STRUCTS)
    assert {each.NAME for each in (*CONTROLS.values(), *COMMANDS.values())} == {
        title(*each) for each in operations()
    }
    assert {each.NAME for each in STRUCTS} == {title(*each) for each in structs()}


@pytest.mark.parametrize(
    ("group", "element"), operations(), ids=[title(*each) for each in operations()]
)
def test_controls_and_commands_are_those_of_the_specification(
    group: ET.Element, element: ET.Element
) -> None:
    code = code_of(element, group)
    declared: type[Operation]
    if element.tag == "control":
        declared = CONTROLS[code]
        assert issubclass(declared, Control)
    else:
        declared = COMMANDS[code]
        assert issubclass(declared, Command)
    assert title(group, element) == declared.NAME
    assert (declared.SIZE, declared.PACK) == (0, 2)
    assert declared_fields(declared) == specified_fields(element, group.attrib["name"])
    assert tuple(title(group, each) for each in element.findall("response")) == declared.ANSWERS
    roles = {each.attrib["role"] for each in element.findall("implement")}
    both = bool(roles & {"sender", "receiver"})
    assert (both or "server" in roles) == declared.TO_SERVER
    assert (both or "client" in roles) == declared.TO_CLIENT


@pytest.mark.parametrize(
    ("group", "element"),
    [each for each in operations() if each[1].tag == "command"],
    ids=[title(*each) for each in operations() if each[1].tag == "command"],
)
def test_commands_have_the_result_and_content_of_the_specification(
    group: ET.Element, element: ET.Element
) -> None:
    declared = COMMANDS[code_of(element, group)]
    result = element.find("result")
    if result is None:
        assert declared.RESULT is None
    else:
        inner = result.find("struct")
        name = result.attrib["type"] if inner is None else inner.attrib["name"]
        assert declared.RESULT is not None
        assert f"{group.attrib['name']}.{name}" == declared.RESULT.NAME
    header = element.find("segments/header")
    entries = () if header is None else tuple(each.attrib["type"] for each in header.iter("entry"))
    assert tuple(each.NAME.partition(".")[2] for each in declared.CONTENT) == entries
    assert (header is not None and header.get("required") == "true") == declared.HEADER_REQUIRED


@pytest.mark.parametrize(("group", "element"), structs(), ids=[title(*each) for each in structs()])
def test_structs_are_those_of_the_specification(group: ET.Element, element: ET.Element) -> None:
    name = title(group, element)
    [declared] = [each for each in STRUCTS if name == each.NAME]
    assert getattr(layouts, class_of(name)) is declared
    assert code_of(element, group) == declared.CODE
    assert int(element.attrib["size"]) == declared.SIZE
    assert int(element.attrib["pack"]) == declared.PACK
    assert declared_fields(declared) == specified_fields(element, group.attrib["name"])
    assert (CODED.get(declared.CODE) is declared) == (declared.CODE != 0)
    made = declared()
    for field in element.findall("field"):
        if field.attrib["type"] == "bit":
            default = getattr(made, field.attrib["name"].replace("-", "_"))
            assert default == (field.get("default") == "1")


def test_nested_structs_are_the_ones_of_their_fields() -> None:
    found = {
        (of.NAME, name, made)
        for of in (*CONTROLS.values(), *COMMANDS.values(), *STRUCTS)
        for name, _, made in wire_fields(of)
        if made is not None
    }
    assert {made for _, _, made in found} == {layouts.ReplyTo, layouts.Xid}
    assert ("message.message-properties", "reply_to", layouts.ReplyTo) in found
    assert len(found) == 9


def test_exceptions_are_those_of_the_specification() -> None:
    codes = {
        choice.attrib["name"]: int(choice.attrib["value"])
        for choice in SPEC.iterfind("class[@name='execution']/domain[@name='error-code']/enum/")
    }
    specified = {
        (title(group, element), where, each.attrib["name"], codes[each.attrib["error-code"]])
        for group, element in operations()
        for where, parent in (
            ("", element),
            *((field.attrib["name"], field) for field in element.findall("field")),
        )
        for each in parent.findall("exception")
    }
    declared = {
        (command, *exception) for command, several in EXCEPTIONS.items() for exception in several
    }
    assert declared == specified
    assert len(declared) == 78


ENUMS = {
    "connection.close-code": layouts.CloseCode,
    "session.detach-code": layouts.DetachCode,
    "execution.error-code": layouts.ErrorCode,
    "message.accept-mode": layouts.AcceptMode,
    "message.acquire-mode": layouts.AcquireMode,
    "message.reject-code": layouts.RejectCode,
    "message.delivery-mode": layouts.DeliveryMode,
    "message.flow-mode": layouts.FlowMode,
    "message.credit-unit": layouts.CreditUnit,
    "dtx.xa-status": layouts.XaStatus,
    "file.return-code": layouts.ReturnCode,
    "stream.return-code": layouts.ReturnCode,
}


def test_codes_and_modes_are_those_of_the_specification() -> None:
    specified = {
        f"{group.attrib['name']}.{domain.attrib['name']}": {
            each.attrib["name"].replace("-", "_").upper(): int(each.attrib["value"])
            for each in domain.iter("choice")
        }
        for group in GROUPS
        for domain in group.findall("domain")
        if domain.find("enum") is not None
    }
    # Priorities are numbers; their names are of no use.
    del specified["message.delivery-priority"]
    declared = {
        name: {each.name: each.value for each in several} for name, several in ENUMS.items()
    }
    assert declared == specified


@pytest.mark.req("D9")
def test_each_control_and_command_has_its_layer() -> None:
    assert set(LAYER_OF) == {title(*each) for each in operations()}
    layers: dict[str, set[Layer]] = {}
    for name, layer in LAYER_OF.items():
        layers.setdefault(name.partition(".")[0], set()).add(layer)
    assert layers.pop("connection") == {Layer.CONNECTION}
    assert layers.pop("session") == {Layer.SESSION}
    assert layers.pop("execution") == {Layer.EXECUTION}
    assert set(layers) == {"message", "tx", "dtx", "exchange", "queue", "file", "stream"}
    assert set.union(*layers.values()) == {Layer.MODEL}
    # Controls act below the execution of commands, commands at it or above.
    for known in CONTROLS.values():
        assert LAYER_OF[known.NAME] < Layer.EXECUTION
    for each in COMMANDS.values():
        assert LAYER_OF[each.NAME] >= Layer.EXECUTION
