"""Branches of distributed transactions (X/Open XA, as AMQP 0-10 has it in its class dtx)."""
