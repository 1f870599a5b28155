"""What decides; pure: no clock, randomness, asyncio, grpc, protobuf or torch."""
