"""Authentication and authorization: SASL mechanisms, users, tokens and access rules."""
