"""``inference.v1.Inference``: the tenants' gRPC API."""
