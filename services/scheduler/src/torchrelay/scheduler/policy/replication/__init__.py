"""Which copies are kept and made: repair.repair, copy_index, copy_placement, balance, replication_state, recent_packs.
Imports core, config.
"""
