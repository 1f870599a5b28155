"""State + one input -> changed state + effects: admissions, scaling, relays, replication. The only code that sees
several rooms at once. Imports state and every room above.
"""
