"""Flags, figures and refusals of the offline benchmarks, with a tiny model."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.benchmarks import latency, scheduler, throughput
from atom.benchmarks.offline import Run
from atom.benchmarks.report import command_line
from atom.outputs import Sequence
