"""How many instances, in which slots: decision.decide, eviction, autoscaler_input, slot_assignment, load_failures.
Imports core, reasons, config, cluster.
"""
