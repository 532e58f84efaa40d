"""The parts that the live pages of an engine and of a router have in common.

- `feed`: server-sent events of one document, asked for once a second for all viewers together.
- `page_files`: the answers to requests for a page's files.
- the folder `page`: style, charts, units, and the browser's side of the events. What is shown, and
  the HTML, are in the folder `page` of the package that shows it.

Imports Starlette, so an engine's process imports it only with the routes.
"""
