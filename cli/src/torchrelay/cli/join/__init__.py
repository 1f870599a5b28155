"""A machine that joins a cluster: its folder, its store and its workers."""
