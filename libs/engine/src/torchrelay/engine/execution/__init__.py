"""Execution of a model's steps: resident weights, runner, stepper, recorded decode steps."""
