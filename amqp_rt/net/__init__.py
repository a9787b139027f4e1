"""Streams, sockets, listeners and dialling. No protocol rules live here."""
