"""Which copies are kept in RAM, which are made and where. ``repair.repair`` decides. Imports core and config."""
