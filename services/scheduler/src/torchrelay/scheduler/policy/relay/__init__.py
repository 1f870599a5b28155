"""Transfers from plan to end: transfers (one state machine), links, replan, transfer_events. Imports planning, core,
reasons, effects.
"""
