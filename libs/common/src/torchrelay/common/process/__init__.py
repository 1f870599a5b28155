"""The life of one process: settings, telemetry, run until a signal, heap."""
