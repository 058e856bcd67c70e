"""The endpoint: an engine behind the HTTP interfaces that agents are written for. Starlette and uvicorn, the extra `serve`."""
