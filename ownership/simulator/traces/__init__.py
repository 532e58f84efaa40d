"""Request traces: one model of sessions and requests, and the readers of recorded traces.

- `session`, `block_runs`: the model. `readers`: every format, `agent_sessions` one of them.
- `lines`: lines of files, with errors that name the line. `prefix_tree`: prompts by their blocks.
- `statistics`, `tables`: what `heterocache trace stats` prints.

May import `hetero_connector.errors` and nothing else of the project. A new format is a function
that returns a `Trace`, and a line in `readers.READERS`.
"""
