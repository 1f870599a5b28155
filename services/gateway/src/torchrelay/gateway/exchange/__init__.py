"""A request on a token path and its answer over HTTP, in whatever dialect."""
