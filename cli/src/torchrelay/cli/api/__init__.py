"""The client of the gateway: which gateway and key, uploads, chat streams, retries."""
