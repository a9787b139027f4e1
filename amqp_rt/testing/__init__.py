"""Test tools, public as ``trio.testing`` is."""
