"""The view of a fleet: which server has how much of a prompt's state, and how sure that is.

`published` is what an engine tells of its chains, `trust` what comparing its own answers with the
router's has shown, `certainty` the result: `exact`, `degraded` or `blind`, with reasons. `prompts`
looks a request up in the ownership directory. `checks` asks one server, `watch` all of them.
`stock` knows the workers without the connector: `event_reader` reads their KV events,
`event_stream` puts them in order, `block_index` has their blocks.

Imports `ownership.directory`, `ownership.scheduling` and `router.identity`.
"""

from ownership.router.view.certainty import Certainty, Reason
from ownership.router.view.checks import Checks
from ownership.router.view.event_reader import EventReader
from ownership.router.view.prompts import FleetChains, PrefixViews, PromptView
from ownership.router.view.published import PublishedChain
from ownership.router.view.stock import StockWorkers
from ownership.router.view.trust import Trust
from ownership.router.view.watch import FleetWatch

__all__ = [
    "Certainty",
    "Checks",
    "EventReader",
    "FleetChains",
    "FleetWatch",
    "PrefixViews",
    "PromptView",
    "PublishedChain",
    "Reason",
    "StockWorkers",
    "Trust",
]
