"""What follower and holder exchange: tickets, frames, and a stream of frames over a ``Connection``."""
