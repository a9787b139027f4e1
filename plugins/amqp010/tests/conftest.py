"""What the tests of the plug-in for AMQP 0-10 may use."""

from __future__ import annotations

import sys
from pathlib import Path

# Modules that several of these tests share lie in this folder.
sys.path.insert(0, str(Path(__file__).parent))

from driven010 import commands, messaging, qpid_python, qpid_server  # noqa: F401 (fixtures)
