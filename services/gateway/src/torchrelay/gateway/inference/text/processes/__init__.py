"""Child processes that run templates and tokenizers: both ends of the socket, and which prompt runs when and where."""
