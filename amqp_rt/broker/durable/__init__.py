"""Durability: the journal of changes to store, paging, large messages and duplicate detection."""
