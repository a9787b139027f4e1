"""Attributes of classes for mypyc, which is not installed where compiled modules run."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ("mypyc_attr",)

if TYPE_CHECKING:
    # mypyc knows the decorator by this definition, also where a module takes it from here.
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_attributes):
        """Return a decorator that leaves the class as it is: only the compiler reads the attributes."""
        return lambda kind: kind
