"""Child processes under supervision: child, supervisor, stack (their groups), log rotation, death with the parent.
Imports errors and common.
"""
