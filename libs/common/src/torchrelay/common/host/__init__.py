"""What the machine has: disk space, memory, devices."""
