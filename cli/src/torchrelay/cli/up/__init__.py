"""The embedded install: its plan, ports, certificates, external servers, progress."""
