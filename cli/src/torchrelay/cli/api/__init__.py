"""Clients of the gateway and the scheduler: which gateway and key, uploads, chat streams, retries."""
