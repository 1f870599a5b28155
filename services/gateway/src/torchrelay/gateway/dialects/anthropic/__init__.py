"""Anthropic's Messages API on the token path."""
