"""Which request goes where: by predicted latency, reserved KV, and what loads."""
