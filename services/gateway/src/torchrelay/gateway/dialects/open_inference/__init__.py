"""``inference.GRPCInferenceService``: the Open Inference Protocol, version 2, of KServe's and Triton's clients."""
