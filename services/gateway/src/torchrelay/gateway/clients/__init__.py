"""calls to scheduler and param-store, their addresses in errors, body rechunking. Imports core only."""
