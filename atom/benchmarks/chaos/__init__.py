"""Faults in a server under load: which streams notice, and for how long.

    python -m atom.benchmarks.chaos URL --admin-socket FILE --scenario worker core
    python -m atom.benchmarks.chaos --scenario all --launch --model PATH -dp 2 --api-server-count 2

scenarios.py    what happens, and when
processes.py    the processes of a server, and signals to them
overload.py     ten times the requests that a server can take
streams.py      clients that keep the ids of their tokens, and resume their streams
run.py          the streams undisturbed, and with the events of a scenario
report.py       what became of the streams, and the pauses after an event
"""
