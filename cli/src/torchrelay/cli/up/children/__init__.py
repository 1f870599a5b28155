"""Child processes under supervision, their logs, and their death with the parent."""
