"""The identity of prompts: from a request's body to the chunk keys that workers store it under.

`bodies` reads a request, `chat` renders its conversation as vLLM does, `tokenizer` makes tokens,
`cuts` knows where a text may be cut without another tokenisation, `chains` names the chunks and
remembers what it has named, so that a turn costs its new tokens. `prompts` joins them. A prompt
that cannot be identified as its worker does says why.

Imports `hetero_connector`'s values (`artifacts`); of transformers only when a tokenizer is opened.
"""

from ownership.router.identity.bodies import Doubt, Prompt
from ownership.router.identity.chains import ChainCache, ChainNaming, NamedPart, PromptChain
from ownership.router.identity.prompts import PromptIdentity
from ownership.router.identity.tokenizer import ModelTokenizer, open_tokenizer

__all__ = [
    "ChainCache",
    "ChainNaming",
    "Doubt",
    "ModelTokenizer",
    "NamedPart",
    "Prompt",
    "PromptChain",
    "PromptIdentity",
    "open_tokenizer",
]
