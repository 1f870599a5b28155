"""The public ports: connections of clients, authenticated or not, over REST and gRPC, with limits of number, size and time."""
