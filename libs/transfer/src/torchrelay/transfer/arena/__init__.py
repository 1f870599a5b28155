"""Host memory that holds packs: the arena file, slabs and their verified bits, retention, range allocation."""
