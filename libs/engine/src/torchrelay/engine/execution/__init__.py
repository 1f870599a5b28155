"""One step: resident model, model runner, stepper, decode graphs. May import every room above; only instance and
warm_up import it.
"""
