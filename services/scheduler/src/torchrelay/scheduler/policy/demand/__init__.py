"""The demand for a model: its arrivals and unused times, and what late requests count."""
