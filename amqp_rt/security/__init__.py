"""Who a peer is: SASL mechanisms, and where identities and passwords come from."""
