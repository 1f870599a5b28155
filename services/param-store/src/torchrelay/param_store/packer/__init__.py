"""The packer: a child process that validates an uploaded model folder and lays it out as a pack.

It parses tenants' files, so it runs in its own process with a memory limit and can be killed. It imports neither gRPC
nor Pydantic. Its job is one JSON object on standard input; progress and result are JSON lines on standard output.
"""
