"""Which copies are kept in RAM, which are made, and where."""
