"""Operations on a running broker, over AMQP."""
