"""Where an attempt runs, by predicted latency and reserved KV."""
