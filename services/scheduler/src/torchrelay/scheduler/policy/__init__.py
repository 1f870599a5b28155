"""The scheduler's decisions as pure functions: no clock, randomness, asyncio, grpc, protobuf or torch."""
