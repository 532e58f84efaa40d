"""Many simulations: which ones, running them side by side, and telling what came of them.

Owns the points of a sweep (`points`), running and resuming them (`running`), the summary over
seeds (`summary`), the report as Markdown and as one HTML file (`report`, `pictures`), and the
command (`command`). A new thing to sweep is a field of `Point`.
"""
