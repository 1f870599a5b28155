"""clients of the REST gateway and the scheduler: access (which gateway and key), client, upload, chat stream, model
folder and its check. Imports errors, home, common, modelspec.
"""
