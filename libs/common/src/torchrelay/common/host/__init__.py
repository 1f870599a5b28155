"""Resources of the machine: disk space, memory, devices."""
