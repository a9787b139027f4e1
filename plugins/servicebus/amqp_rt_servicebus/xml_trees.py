"""Trees of XML elements: documents of peers read within bounds, and documents of ours written.

Reading stands on expat. A document type declaration is refused where it begins, so that no entity is
ever declared, expanded or fetched; depth and number of elements are bounded while they arrive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from xml.parsers import expat

from msgspec import Struct

#: Maximum number of octets of a document.
DOCUMENT_MAX: Final = 1 << 20
#: Maximum depth of elements; the deepest document of the service has 9.
DEPTH_MAX: Final = 32
#: Maximum number of elements: more than 600 parameters of a rule. Reading them takes some 5 ms.
ELEMENTS_MAX: Final = 2_048

#: Namespace of ``type`` and ``nil`` (XML Schema Part 1 §2.6).
XSI: Final = "http://www.w3.org/2001/XMLSchema-instance"

#: Characters that no XML 1.0 document can hold, not even as references (XML 1.0 §2.2).
_NO_CHARACTERS: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ESCAPES: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "\r": "&#13;"}
)
#: Line ends in attributes would be read as spaces (XML 1.0 §3.3.3).
_ATTRIBUTE_ESCAPES: Final = _ESCAPES | str.maketrans({"\n": "&#10;", "\t": "&#9;"})


class DocumentRefused(ValueError):
    """The document is no well-formed XML within the bounds, or declares a document type."""


class Element(Struct, gc=False):
    """Element of a document: its namespace, local name, attributes, children and text.

    Elements refer to those within them only. The collector leaves them out: thousands that arrive at once
    would make it visit all other objects of the process.
    """

    namespace: str
    name: str
    #: By ``namespace name``, or ``name`` for attributes without a namespace.
    attributes: Mapping[str, str]
    #: A tuple, which the collector drops at its first visit, as it does not track its items.
    children: tuple[Element, ...] = ()
    #: Text directly in this element, joined.
    text: str = ""

    @property
    def type(self) -> str:
        """Local part of ``xsi:type``, empty without one."""
        return self.attributes.get(f"{XSI} type", "").rpartition(":")[2].strip()

    @property
    def nil(self) -> bool:
        """Whether ``xsi:nil`` says that there is no value."""
        return self.attributes.get(f"{XSI} nil", "").strip() in ("true", "1")

    def find(self, namespace: str, name: str) -> Element | None:
        """Return the only child of that name, None if there is none.

        Raises:
            DocumentRefused: There are several.
        """
        found = list(self.each(namespace, name))
        if len(found) > 1:
            raise DocumentRefused(f"{self.name} has {len(found)} elements {name}, not one")
        return found[0] if found else None

    def each(self, namespace: str, name: str) -> Iterator[Element]:
        """Return the children of that name."""
        return (each for each in self.children if each.name == name and each.namespace == namespace)


def parse(document: bytes) -> Element:
    """Return the root of *document*, which is in UTF-8.

    Raises:
        DocumentRefused: It is too large, too deep, not well-formed, or has a document type
            declaration.
    """
    if len(document) > DOCUMENT_MAX:
        raise DocumentRefused(
            f"the document has {len(document)} octets; at most {DOCUMENT_MAX} are read"
        )
    builder = _Builder()
    # The encoding is given, so that the document's own declaration selects no other codec.
    parser = expat.ParserCreate("utf-8", " ")
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = builder.refuse_type
    try:
        parser.Parse(document, True)
    except expat.ExpatError as error:
        raise DocumentRefused(f"the document is no well-formed XML: {error}") from None
    return builder.root


class _Builder:
    """Handlers of one parser."""

    def __init__(self) -> None:
        self.root = Element("", "", {})
        self._open: list[Element] = []
        #: Children of the open elements that have some, by their depth.
        self._children: list[list[Element] | None] = []
        self._texts: list[list[str]] = []
        self._count = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """Add an element below the one that is open."""
        self._count += 1
        if self._count > ELEMENTS_MAX:
            raise DocumentRefused(f"the document has more than {ELEMENTS_MAX} elements")
        if len(self._open) >= DEPTH_MAX:
            raise DocumentRefused(f"elements of the document are nested more than {DEPTH_MAX} deep")
        namespace, _, local = name.rpartition(" ")
        element = Element(namespace, local, attributes)
        if self._open:
            children = self._children[-1]
            if children is None:
                children = self._children[-1] = []
            children.append(element)
        else:
            self.root = element
        self._open.append(element)
        self._children.append(None)
        self._texts.append([])

    def data(self, text: str) -> None:
        """Collect text; pieces are joined once, at the end of the element."""
        self._texts[-1].append(text)

    def end(self, name: str) -> None:
        """Close the open element."""
        element = self._open.pop()
        children = self._children.pop()
        if children is not None:
            element.children = tuple(children)
        element.text = "".join(self._texts.pop())

    def refuse_type(self, *_: Any) -> None:
        """Refuse a document type declaration, where entities would be declared."""
        raise DocumentRefused("the document has a document type declaration, which is not read")


def text_of(value: str) -> str:
    """Return *value* as character data; characters that XML cannot hold become U+FFFD."""
    return _NO_CHARACTERS.sub("\ufffd", value).translate(_ESCAPES)


def tag(name: str, content: str | Iterable[str] = "", /, **attributes: str) -> str:
    """Return an element whose *content* is markup; ``__`` in names of attributes stands for a colon."""
    inner = content if isinstance(content, str) else "".join(content)
    opened = "".join(
        f' {key.replace("__", ":")}="{_attribute(value)}"' for key, value in attributes.items()
    )
    return f"<{name}{opened}>{inner}</{name}>" if inner else f"<{name}{opened} />"


def _attribute(value: str) -> str:
    return _NO_CHARACTERS.sub("\ufffd", value).translate(_ATTRIBUTE_ESCAPES)
