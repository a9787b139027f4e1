"""Filters and selectors of consumers, and the views of messages that they read."""
