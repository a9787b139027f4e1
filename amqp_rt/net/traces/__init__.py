"""Traces of connections: recording, removal of secrets, a codec for test data, and drawings."""
