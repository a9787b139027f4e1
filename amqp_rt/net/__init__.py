"""Streams, sockets, listeners and dialling, without protocol rules."""
