"""Where a broker keeps what must outlive its process."""
