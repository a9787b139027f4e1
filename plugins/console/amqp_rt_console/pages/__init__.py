"""Pages of the console: HTML made from the management types, which works without script."""

from __future__ import annotations

from .console import Console, problem_page

__all__ = ["Console", "problem_page"]
