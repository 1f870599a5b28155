"""The packer: a child process that validates an uploaded model folder and lays it out as a pack.

It parses tenants' files, so it runs in a separate process with a memory limit and can be killed. It imports neither
gRPC nor Pydantic. Its job is a JSON object on standard input; progress and result are JSON lines on standard output.
"""
