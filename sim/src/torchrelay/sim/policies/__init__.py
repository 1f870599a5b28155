"""The systems that are compared: the scheduler's own strategies, and those that papers state, on one cluster"""
