"""The embedded install: command, options, plan, ports, external servers, remote store, certificates, tls, progress,
run. Imports children, views.console, api.access, home.
"""
