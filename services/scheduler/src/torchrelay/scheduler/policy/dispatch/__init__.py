"""Where one attempt runs: placement.place, latency models, kv_transfer_time, reservations, prefix_index. Imports core,
prediction, config, cluster.
"""
