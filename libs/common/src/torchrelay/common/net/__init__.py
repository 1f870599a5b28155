"""Connections: gRPC (rpc), health check, NATS, Redis, load reports. Imports root and process."""
