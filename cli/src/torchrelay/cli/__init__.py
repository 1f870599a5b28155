"""The `torchrelay` program: starts the platform and calls it"""
