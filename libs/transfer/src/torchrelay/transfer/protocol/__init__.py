"""The protocol between follower and holder: tickets, frames, and a stream of frames over a ``Connection``."""
