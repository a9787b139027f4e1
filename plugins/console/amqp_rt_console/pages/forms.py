"""Forms made from the JSON Schemas of management types, and the attributes that a filled form stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from amqp_rt.cli.tables import plain
from amqp_rt.errors import AmqpError

#: Fields that every entity has, or that name it: no form asks for them.
_OWN: Final = frozenset(("name", "identity", "type", "kind"))


class FormField(Struct, frozen=True):
    """A field of a form."""

    name: str
    #: ``text``, ``number``, ``choice``, ``lines`` or ``json``.
    control: str
    #: Texts to choose from.
    choices: tuple[str, ...] = ()
    required: bool = False
    #: Value that the field has before it is edited, as text; empty for none.
    value: str = ""
    #: Value that applies if the field is left empty, as text.
    default: str = ""
    #: Whether only whole numbers are meant.
    whole: bool = False

    @property
    def label(self) -> str:
        """Name of the field as people read it."""
        name = self.name.replace("_", " ")
        return f"{name.removesuffix(' s')} (seconds)" if self.name.endswith("_s") else name


def fields_of(schema: Mapping[str, Any], row: Mapping[str, Any] | None = None) -> list[FormField]:
    """Return the fields of the form for entities with *schema*, as ``GET-SCHEMA`` returns it.

    Args:
        schema: JSON Schema of the attributes.
        row: Present attributes of an entity that is to be changed.
    """
    definitions = schema.get("$defs", {})
    root = _resolved(schema, definitions)
    required = set(root.get("required", ()))
    found = []
    for name, kind in root.get("properties", {}).items():
        if name in _OWN:
            continue
        field = _field(name, kind, definitions, required=name in required)
        if row is not None:
            present = row.get(name)
            if not _fits(field, present):
                # A statistic with the name of a setting, which hides its value.
                continue
            field = _with_value(field, present)
        found.append(field)
    return found


def _resolved(kind: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    while isinstance(named := kind.get("$ref"), str):
        kind = definitions.get(named.rpartition("/")[2], {})
    return kind


def _field(
    name: str, kind: Mapping[str, Any], definitions: Mapping[str, Any], *, required: bool
) -> FormField:
    default = kind.get("default")
    kinds = [
        _resolved(each, definitions)
        for each in (kind.get("anyOf") or [_resolved(kind, definitions)])
    ]
    kinds = [each for each in kinds if each.get("type") != "null"]
    types = {each.get("type") for each in kinds}
    control = "json"
    choices: tuple[str, ...] = ()
    if len(kinds) == 1 and "enum" in kinds[0]:
        control, choices = "choice", tuple(map(str, kinds[0]["enum"]))
    elif types == {"boolean"}:
        control, choices = "choice", ("yes", "no")
    elif types <= {"integer", "number"} and types:
        control = "number"
    elif types == {"string"}:
        control = "text"
    elif types == {"array"} and _resolved(kinds[0].get("items", {}), definitions).get("type") in ("string", None):  # fmt: skip
        control = "lines"
    return FormField(
        name,
        control,
        choices,
        required=required,
        default=_as_text(control, default),
        whole=types == {"integer"},
    )


def _fits(field: FormField, value: object) -> bool:
    if value is None:
        return True
    match field.control:
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "choice" if field.choices == ("yes", "no"):
            return isinstance(value, bool)
        case "text" | "choice":
            return isinstance(value, str)
        case "lines":
            return isinstance(value, list | tuple) and all(isinstance(e, str) for e in value)
    return True


def _with_value(field: FormField, value: object) -> FormField:
    return FormField(
        field.name,
        field.control,
        field.choices,
        required=field.required,
        value=_as_text(field.control, value),
        default=field.default,
        whole=field.whole,
    )


def _as_text(control: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if control == "lines" and isinstance(value, list | tuple):
        return "\n".join(map(str, value))
    if control == "json":
        return json.dumps(plain(value), ensure_ascii=False)
    return str(value)


def attributes_in(
    form: Mapping[str, str], fields: list[FormField], *, changing: bool = False
) -> dict[str, Any]:
    """Return the attributes that a filled *form* with *fields* stands for.

    Args:
        form: Texts by the names of the fields; those of attributes begin with ``a.``.
        fields: The fields of the form.
        changing: Return only the differences from the values of the fields, so that the changes of others meanwhile stay;
            an emptied field takes its default back. Otherwise fields that are empty are left out.

    Raises:
        AmqpError: A text does not fit its field; the description names it.
    """
    found: dict[str, Any] = {}
    for field in fields:
        text = form.get(f"a.{field.name}", field.value).replace("\r\n", "\n").strip()
        if changing and text == field.value:
            continue
        if text:
            found[field.name] = _value(field, text)
        elif changing:
            found[field.name] = _value(field, field.default) if field.default else None
        elif field.required:
            raise _refused(f"{field.label} must be given")
    return found


def _value(field: FormField, text: str) -> Any:
    if field.control == "number":
        try:
            return int(text)
        except ValueError:
            try:
                return float(text)
            except ValueError:
                raise _refused(f"{field.label} must be a number, got {text!r:.50}") from None
    if field.control == "choice":
        if text not in field.choices:
            raise _refused(f"{field.label} must be one of {', '.join(field.choices)}")
        return text == "yes" if field.choices == ("yes", "no") else text
    if field.control == "lines":
        return [line.strip() for line in text.splitlines() if line.strip()]
    if field.control == "json":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            # A text is meant, such as the name of a header without quotation marks.
            return text
    return text


def _refused(description: str) -> AmqpError:
    return AmqpError(description, condition="amqp:invalid-field")
