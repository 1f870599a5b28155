"""Attacks and faults with a platform of their own: full disks, taken ports, little memory, wrong settings."""
