"""Routes over several containers: links joined end to end along a path that the first node chooses."""

from __future__ import annotations

from .bridges import Bridge, Pull, Push
from .instances import MeshInstance
from .mesh import Mesh, MeshError
from .rules import MeshRule
from .statistics import MeshMemberState, MeshStats

__all__ = [
    "Bridge",
    "Mesh",
    "MeshError",
    "MeshInstance",
    "MeshMemberState",
    "MeshRule",
    "MeshStats",
    "Pull",
    "Push",
]
