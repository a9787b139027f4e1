"""A shop that takes orders and bills them."""
