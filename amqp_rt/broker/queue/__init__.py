"""Queues: their messages, the turns of their consumers, and the part that is in the store only."""
