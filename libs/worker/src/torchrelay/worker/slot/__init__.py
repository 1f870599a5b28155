"""the instance in the slot: state machine, loading, engine thread; may import metrics, settings"""
