"""Launchers, which start and stop workers, and the driver that makes them follow the scheduler's target."""
