"""Bodies of requests: their decoding, and the fields that several dialects share."""
