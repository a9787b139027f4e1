"""The type system of Part 1, between values and bytes; independent of connections."""
