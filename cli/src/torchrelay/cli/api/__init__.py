"""Clients of the gateway and the scheduler: access (which gateway and key), client, upload, chat stream, model folder
and its checks, retries. Imports errors, home, common, modelspec.
"""
