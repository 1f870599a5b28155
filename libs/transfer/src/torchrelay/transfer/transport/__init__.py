"""Byte streams between nodes: the Transport interface, TCP with pacing, TLS, shared memory, the choice by address.
Imports common.
"""
