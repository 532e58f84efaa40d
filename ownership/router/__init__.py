"""OwnerServe's router: it stands before the servers and decides where each request runs.

- `identity`: a request's tokens, and the names of its chunks, as the workers' connectors have them.
- `view`: which worker has how much of a request's state, and how sure that is.
"""
