"""Requests at a core: admission, queues, states, token ids, grammars, and resumable streams."""
