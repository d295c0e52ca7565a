"""The forms in which the library takes prompts and conversations: one of them, or a list."""

from collections.abc import Sequence
from typing import Any, TypeGuard

__all__ = ["Conversation", "Prompt", "Prompts", "conversations_of", "prompt_of", "prompts_of"]

Prompt = str | list[int]
"""A text, or its token ids."""
Prompts = str | list[int] | list[str] | list[list[int]]
Conversation = list[dict[str, Any]]
"""The messages of one conversation, as in the chat API."""


def prompts_of(prompts: Prompts) -> list[Prompt]:
    """The prompts of one text, one list of token ids, or a list of either. Raises TypeError for others."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise TypeError(
            f"prompts of type {type(prompts).__name__}: give a text, a list of token ids, or a list of either"
        )
    if prompts and _are_token_ids(prompts):
        return [list(prompts)]  # type: ignore[arg-type]
    return [prompt_of(prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]


def prompt_of(prompt: object, name: str = "the prompt") -> Prompt:
    """One prompt. Raises TypeError with its `name` for another form."""
    if isinstance(prompt, str):
        return prompt
    if _is_list(prompt) and _are_token_ids(prompt):
        return list(prompt)
    raise TypeError(f"{name} is neither a text nor a list of token ids")


def conversations_of(messages: Conversation | list[Conversation]) -> list[Conversation]:
    """The conversations of one list of messages, or of a list of such lists.

    Raises TypeError for another form, ValueError for a conversation without messages.
    """
    if not _is_list(messages):
        raise TypeError(
            f"messages of type {type(messages).__name__}: give a list of messages, or of such lists"
        )
    several = bool(messages) and all(map(_is_list, messages))
    conversations: list[Conversation] = list(messages) if several else [messages]  # type: ignore[list-item]
    for conversation in conversations:
        if not conversation:
            raise ValueError("a conversation has no messages: give at least one, with role and content")
        for message in conversation:
            if not isinstance(message, dict):
                kind = type(message).__name__
                raise TypeError(f"a message of type {kind}: each is an object with role and content")
    return conversations


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_token_ids(values: Sequence[Any]) -> bool:
    # By type, of which there is one: a Python call for each id would take longer than all the rest.
    return all(issubclass(kind, int) and kind is not bool for kind in set(map(type, values)))
