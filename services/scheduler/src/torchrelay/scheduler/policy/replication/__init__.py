"""Replication of packs in RAM: the copies to keep and to make, and their hosts."""
