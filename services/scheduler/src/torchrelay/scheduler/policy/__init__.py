"""What decides; pure. Root modules: core (nouns), timed_phase, prediction, reasons, config, effects, [inputs], state,
policy, explain. No clock, randomness, asyncio, grpc, protobuf, torch.
"""
