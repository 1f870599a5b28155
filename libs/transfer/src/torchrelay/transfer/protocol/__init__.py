"""What follower and holder say to each other: tickets, frames, a stream of frames over a Connection. Imports
transport.interface, manifest, errors, proto.
"""
