"""The gateway's SQL: its tables, its one engine, its migrations."""
