"""The batch of a step: the requests that decode, their drafts, and what was sampled."""
