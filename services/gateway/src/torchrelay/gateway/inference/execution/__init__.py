"""A request from admission to settlement, over streams to the scheduler and the workers."""
