"""One file per command: options in, api calls, views out."""
