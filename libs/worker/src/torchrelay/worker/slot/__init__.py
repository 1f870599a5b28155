"""The instance in the slot: its state machine, its loading, and the thread that runs it."""
