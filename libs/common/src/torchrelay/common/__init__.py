"""Settings, errors, ids, telemetry and the set-up of gRPC, NATS and Redis for every Torchrelay service."""
