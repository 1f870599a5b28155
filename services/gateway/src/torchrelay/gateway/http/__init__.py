"""ASGI router, uvicorn server, FastAPI app, its dependencies and error handlers. Imports everything below except
inference.
"""
