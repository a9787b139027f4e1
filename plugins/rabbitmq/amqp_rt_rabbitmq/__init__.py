"""Listeners for the AMQP 1.0 clients of RabbitMQ 4."""
