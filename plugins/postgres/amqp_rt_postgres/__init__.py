"""Store of a broker in PostgreSQL, which one of several brokers uses at a time."""

from .store import PostgreSQLStore

__all__ = ["PostgreSQLStore"]
