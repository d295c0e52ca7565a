"""How models write their replies: reasoning, text and tool calls.

`base` defines what a parser returns and `text` the state machine that most families share. Each family is
one file. `choose` finds the family of a checkpoint, and lists the names of `--tool-call-parser` and
`--reasoning-parser`.
"""
