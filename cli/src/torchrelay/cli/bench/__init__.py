"""Loads on a live platform through its public API, and what they measure: `torchrelay bench`"""
