"""Step metrics, time shares and latency fits: the lowest layer of the worker."""
