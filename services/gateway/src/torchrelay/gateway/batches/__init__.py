"""Files of tenants, and batches: the lines of a file, each run as a request."""
