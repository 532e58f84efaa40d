"""The view of a fleet: which server has how much of a prompt's state, and how sure that is.

`published` is what an engine tells of its chains, `trust` what comparing its own answers with the
router's has shown, `certainty` the result: `exact`, `degraded` or `blind`, with reasons. `prompts`
looks a request up in the ownership directory. `checks` asks one server, `watch` all of them.

Imports `ownership.directory`, `ownership.scheduling` and `router.identity`.
"""

from ownership.router.view.certainty import Certainty, Reason
from ownership.router.view.checks import Checks
from ownership.router.view.prompts import FleetChains, PrefixViews, PromptView
from ownership.router.view.published import PublishedChain
from ownership.router.view.trust import Trust
from ownership.router.view.watch import FleetWatch

__all__ = [
    "Certainty",
    "Checks",
    "FleetChains",
    "FleetWatch",
    "PrefixViews",
    "PromptView",
    "PublishedChain",
    "Reason",
    "Trust",
]
