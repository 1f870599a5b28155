"""`torchrelay size`: the resources that a model needs."""
