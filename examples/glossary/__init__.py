"""A tiny chat model that explains Torchrelay's own words."""
