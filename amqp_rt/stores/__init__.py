"""Storage of a broker's durable data."""
