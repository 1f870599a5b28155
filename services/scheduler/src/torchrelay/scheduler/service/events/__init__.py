"""The history on JetStream, written and read."""
