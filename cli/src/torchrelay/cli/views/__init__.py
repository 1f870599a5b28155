"""what is drawn on the terminal: console, event lines, packs, relays, cluster, word wrap (and timeline, split from
commands.explain). Imports errors and common; no I/O but console.
"""
