"""The HTTP server: router, uvicorn, and the FastAPI app with its dependencies and error handlers."""
