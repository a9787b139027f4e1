"""Routes over several containers: links joined end to end along a path that the first node chooses."""

from __future__ import annotations

from .bridges import Bridge, Pull, Push
from .instances import MeshInstance
from .mesh import Mesh, MeshError
from .records import GIVES, LINK_ROUTED, PATTERN, TAKES, Offer
from .rules import MeshRule
from .statistics import MeshMemberState, MeshStats

__all__ = [
    "GIVES",
    "LINK_ROUTED",
    "PATTERN",
    "TAKES",
    "Bridge",
    "Mesh",
    "MeshError",
    "MeshInstance",
    "MeshMemberState",
    "MeshRule",
    "MeshStats",
    "Offer",
    "Pull",
    "Push",
]
