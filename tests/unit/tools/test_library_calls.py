"""Counts: every function of AITER and MORI that we call is emulated, and a swap of its arguments is found.

Each call is bound to its signature in tests/arch/test_contracts.py.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

from tests.aiter_contract import package, reduce
from tests.helpers.parallel import mori_swaps
from tests.helpers.parallel.simulated_mori import SimulatedOp, Simulation, semantics_of
from tests.helpers.source import ROOT, package_files
from tools.library_calls import Use, package_uses

SWAPS_ARE_IN = "tests.unit.atom_ops.aiter_impl"


@cache
def calls() -> list[Use]:
    """Every call of a function of AITER or MORI in our packages."""
    found = package_uses([ROOT / path for path in package_files()])
    return [use for use in found if use.call is not None and use.name.startswith(("aiter.", "mori."))]


def swaps() -> Iterator[tuple[str, str, str]]:
    """Every swap of two arguments that a test finds."""
    modules = [
        import_module(f"{SWAPS_ARE_IN}.{path.stem}")
        for path in (ROOT / SWAPS_ARE_IN.replace(".", "/")).glob("test_*.py")
    ]
    lists = [value for module in modules for name, value in vars(module).items() if name.endswith("SWAPS")]
    yield from _flat([*lists, *reduce.SWAPS.values(), mori_swaps.SWAPS])


def _flat(value: Any) -> Iterator[tuple[str, str, str]]:
    """The swaps anywhere in lists and tuples."""
    if isinstance(value, tuple) and len(value) == 3 and str(value[0]).startswith(("aiter.", "mori.")):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)


def test_every_function_that_is_called_is_emulated() -> None:
    op = "mori.ops.EpDispatchCombineOp"
    emulated = {*package.SEMANTICS, *package.QUANTIZED, *reduce.SEMANTICS}
    emulated |= set(semantics_of(Simulation(None, None)))  # type: ignore[arg-type]
    emulated |= {f"{op}.{name[1:]}" for name in vars(SimulatedOp) if name.startswith("_")}
    emulated |= {name for group in vars(package).values() if isinstance(group, dict) for name in group}
    missing = {use.name: use.place for use in calls() if use.name not in emulated}
    assert not missing and len(calls()) >= 70


def test_a_confusion_of_arguments_of_every_call_is_found() -> None:
    """A test swaps some arguments of each call with two or more."""
    swapped: dict[str, set[str]] = {}
    for name, first, second in swaps():
        swapped.setdefault(name, set()).update((first, second))
    missing = []
    for use in calls():
        assert use.call is not None
        given = {str(each.arg) for each in use.call.keywords}
        if len(given) > 1 and not given & swapped.get(use.name, set()):
            missing.append(f"{use.place}: {use.name}")
    assert not missing
