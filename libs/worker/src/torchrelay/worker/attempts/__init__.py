"""running attempts, gateway outboxes, stop strings, usage registers; imports common, engine.core; not metrics, slot"""
