"""HTTP around the jobs; the only place that imports FastAPI, uvicorn and pydantic, and is imported to serve only.

Read in this order:

1. `bodies`: what requests may say; `guard`: secrets and sizes, before anything is read;
2. `service`: waiting, and plans that are made meanwhile; `app`: the routes;
3. `metrics`, `status_page`: watching; `serve`: from settings to a running server.
"""
