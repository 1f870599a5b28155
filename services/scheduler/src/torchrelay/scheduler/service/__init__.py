"""What talks: controller, actuator, servicer, converters, discovery, admit_streams, peer_channels, epoch,
ticket_issuer, cluster_view, relay_view. Imports policy.*, grpc, NATS.
"""
