"""The history on JetStream: publisher, reader."""
