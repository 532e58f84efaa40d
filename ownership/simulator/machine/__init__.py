"""What a simulated worker is: how fast it computes and moves bytes, and how it batches.

Owns the public figures of hardware (`hardware`) and of models' compute (`models`), the cost model
made of both or read from a profile (`costs`), channels that bytes queue for (`channel`), and the
engine (`batching`: continuous batching with chunked prefill, by `steps`' durations). Costs are the
planner's own model and classes; nothing here decides what is restored or where a request runs.
"""
