"""The follower's side: follow() from one or several sources; pure: source_policy, chunk_assignment, source_state,
rates. Imports protocol, transport, buffers, errors.
"""
