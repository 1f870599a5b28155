"""Host memory that holds packs: the arena file, its slabs and their verified bytes, allocation, retention."""
