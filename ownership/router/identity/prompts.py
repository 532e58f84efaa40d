"""From a request to the chunk keys of its prompts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from ownership.router.identity.bodies import (
    CHARACTERS_PER_TOKEN,
    Conversation,
    Doubt,
    Prompt,
    read_prompts,
)
from ownership.router.identity.chains import ChainCache, ChainNaming, PromptChain
from ownership.router.identity.chat import (
    Rendered,
    TemplateError,
    render,
    takes_system_messages_anywhere,
)
from ownership.router.identity.tokenizer import ModelTokenizer
from ownership.router.identity.translations import EFFORTS, MessagesHabits


class NamedPrompt(NamedTuple):
    """The chain of one prompt, and what speaks against it."""

    chain: PromptChain | None
    """None if nothing of the prompt is known. With a doubt, its beginning may be right."""
    doubts: tuple[Doubt, ...]


class PromptIdentity:
    """Identifies the prompts of one model's requests. Thread-safe."""

    def __init__(
        self,
        tokenizer: ModelTokenizer | None,
        cache: ChainCache,
        *,
        chat_template: str | None = None,
        template_kwargs: dict[str, object] | None = None,
    ) -> None:
        """`tokenizer`: None if it could not be opened. `chat_template` and `template_kwargs`: those
        that the servers were started with, `--chat-template` and `--default-chat-template-kwargs`.
        """
        self.tokenizer = tokenizer
        self._cache = cache
        self._template = chat_template
        self._template_kwargs = template_kwargs or {}
        self._habits = MessagesHabits(self._merges_system(), self._disabled_effort())

    def read(self, path: str, body: object) -> list[Prompt]:
        """Return the prompts of a request as texts or tokens, by the path that it is sent to.

        Empty for a path without prompts. Never raises for what a client wrote.
        """
        return [self._rendered(prompt) for prompt in read_prompts(path, body, self._habits)]

    def name(self, prompt: Prompt, naming: ChainNaming, until_s: float = math.inf) -> NamedPrompt:
        """Return the chain of a prompt that was read. `until_s`: as for `ChainCache.of_text`, which
        raises TimeoutError."""
        try:
            if prompt.tokens is not None:
                return NamedPrompt(self._cache.of_tokens(prompt.tokens, naming), prompt.doubts)
            if prompt.text is None or self.tokenizer is None:
                doubts = prompt.doubts or (Doubt.NO_TOKENIZER,)
                return NamedPrompt(None, doubts)
            chain = self._cache.of_text(
                self.tokenizer,
                prompt.text,
                naming,
                is_wrapped=prompt.is_wrapped,
                until_s=until_s,
            )
        except ValueError:
            return NamedPrompt(None, (*prompt.doubts, Doubt.BODY))
        return NamedPrompt(chain, prompt.doubts)

    def _rendered(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its conversation as a text."""
        conversation = prompt.conversation
        if conversation is None:
            return prompt
        if self.tokenizer is None:
            return replace(prompt, doubts=(*prompt.doubts, Doubt.NO_TOKENIZER))
        try:
            text, is_whole, unread = self._text(conversation)
        except TemplateError:
            return replace(prompt, doubts=(*prompt.doubts, Doubt.TEMPLATE))
        if is_whole:
            return replace(prompt, text=text)
        # Tokens may merge over the end of what is known.
        end = self.tokenizer.cuts.last(text)
        doubts = (*prompt.doubts, Doubt.MEDIA)
        tokens = unread // CHARACTERS_PER_TOKEN
        return replace(prompt, text=text[:end], unread=tokens, doubts=doubts)

    def _text(self, conversation: Conversation) -> Rendered:
        """Return a conversation as the model's template renders it. Raises TemplateError."""
        template = self._served_template(conversation.tools is not None)
        if self.tokenizer is None or template is None:
            raise TemplateError("no chat template")
        kwargs = {**self._template_kwargs, **conversation.template_kwargs}
        given = Conversation(conversation.messages, conversation.tools, kwargs)
        return render(given, template, self.tokenizer.special_texts)

    def _served_template(self, has_tools: bool) -> str | None:
        if self._template is not None or self.tokenizer is None:
            return self._template
        return self.tokenizer.template(has_tools)

    def _merges_system(self) -> bool:
        """Return whether vLLM moves system messages of `/v1/messages` to the beginning."""
        templates = {self._served_template(False), self._served_template(True)}
        return not all(x and takes_system_messages_anywhere(x) for x in templates)

    def _disabled_effort(self) -> str:
        """Return the effort for disabled thinking: "none", unless the template does not know it."""
        without = self._with_effort("none")
        if without is None or any(self._with_effort(x) == without for x in EFFORTS):
            return "low"
        return "none"

    def _with_effort(self, effort: str) -> Rendered | None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
        [prompt] = read_prompts("/v1/chat/completions", body, MessagesHabits())
        try:
            return None if prompt.conversation is None else self._text(prompt.conversation)
        except TemplateError:
            return None
