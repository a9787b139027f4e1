"""The type system of Part 1: values to bytes and back. It knows nothing of connections."""
