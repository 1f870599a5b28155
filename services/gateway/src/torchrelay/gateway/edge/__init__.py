"""The public ports: connections of clients over REST and gRPC, with limits of number, size and time."""
