"""Which workers and stores are present, and what runs on them."""
