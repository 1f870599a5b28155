"""The packer: a child process that validates an uploaded model folder and lays it out as a pack.

It runs apart from the store because it reads what tenants made: it has a memory limit of its own and can be killed. It
imports neither gRPC nor Pydantic; its job comes as one JSON object on standard input, progress and result leave as JSON
lines on standard output.
"""
