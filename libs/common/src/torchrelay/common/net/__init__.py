"""Connections: gRPC and its health check, NATS, Redis, load reports."""
