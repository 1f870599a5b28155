"""The remote store: its interface and backends, its keys, and the published versions in it."""
