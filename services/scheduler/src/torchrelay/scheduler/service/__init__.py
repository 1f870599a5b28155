"""Communication: gRPC, NATS, tickets, metrics, and the controller between these and the policy."""
