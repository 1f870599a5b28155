"""Who a process is and who may call what: keys, tokens, roles, certificates."""
