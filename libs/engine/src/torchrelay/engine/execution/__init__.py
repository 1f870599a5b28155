"""One step of one model: resident weights, runner, stepper, recorded decode steps."""
