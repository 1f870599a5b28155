"""The compared systems: the scheduler's own strategies and published ones, on the same cluster"""
