"""The public dialects of the token path, side by side: none imports another."""
