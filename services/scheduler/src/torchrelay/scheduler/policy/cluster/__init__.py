"""Who is there and what runs: membership (reports, suspicion, fencing, expiry), instances, version_aliases, tiers.
Imports core, reasons.
"""
