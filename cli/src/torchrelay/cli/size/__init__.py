"""The resources that a model needs: `torchrelay size`."""
