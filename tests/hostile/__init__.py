"""Attacks on a whole platform, beside a neighbour whose chats must go on."""
