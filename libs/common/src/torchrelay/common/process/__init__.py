"""The life of one process: settings, telemetry, service (run until signal, ready file), heap. Imports root."""
