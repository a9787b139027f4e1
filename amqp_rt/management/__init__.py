"""Management of a running broker over AMQP."""
