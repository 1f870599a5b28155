"""``inference.v1.Inference``: the gRPC API of Torchrelay itself."""
