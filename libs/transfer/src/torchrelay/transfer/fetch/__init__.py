"""The follower's side: ``follow`` from one or several sources.

Its pure core is ``source_policy`` > ``chunk_assignment`` > ``source_state`` > ``rates``.
"""
