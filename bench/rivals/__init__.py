"""The systems that the scheduler is compared with, as their papers describe them, on the same simulated cluster."""
