"""What is drawn on the terminal: console, event lines, packs, relays, cluster, timeline, word wrap. Imports errors and
common; only console does I/O.
"""
