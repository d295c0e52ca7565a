"""Conversations grow by inputs and replies; a fork's does not change its parent's."""

from atom.benchmarks.agentic.contexts import ChatContext, IdsContext, Tokens
from atom.benchmarks.serving.datasets import TextSource


def test_a_chat_is_messages(source: TextSource) -> None:
    tokens = Tokens(source, 0)
    chat = ChatContext.shared(tokens, 20)
    chat.add_input(tokens, 5)
    fork = chat.fork()
    chat.add_reply(tokens, "yes", 1)
    prompt, fields = chat.prompt()
    assert prompt == ""
    assert [message["role"] for message in fields["messages"]] == ["system", "user", "assistant"]
    assert fields["messages"][-1]["content"] == "yes"
    assert fork.prompt()[1]["messages"] == fields["messages"][:2]
    assert ChatContext.shared(tokens, 0).prompt()[1]["messages"] == []


def test_texts_have_about_their_number_of_tokens(source: TextSource) -> None:
    tokens = Tokens(source, 0)
    assert source.tokenizer is not None
    assert 10 <= len(source.tokenizer.encode(tokens.text(20))) <= 30


def test_ids_are_of_the_vocabulary_and_replies_are_appended(source: TextSource) -> None:
    assert source.tokenizer is not None
    tokens = Tokens(source, 0)
    context = IdsContext.shared(tokens, 7)
    fork = context.fork()
    context.add_reply(tokens, "a b", 99)
    assert context.prompt() == (fork.prompt()[0] + source.tokenizer.encode("a b"), {})  # type: ignore[operator]
    without = Tokens(TextSource(None, 50), 0)
    drawn = IdsContext.shared(without, 7)
    drawn.add_reply(without, "", 3)
    ids, _ = drawn.prompt()
    assert len(ids) == 10 and all(isinstance(each, int) and 0 <= each < 50 for each in ids)
