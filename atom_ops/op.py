"""What an op is: one torch function, and the faster providers that may stand in for it.

The function is the meaning of the op, the reference of its tests and the path of every device
that has nothing better. A provider is another function with the same signature, written beside
its kernel and registered with two checks: `supported` looks at the device once, when a worker
starts; `supports` looks at the arguments of one call. Neither reads the environment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from atom_ops.tolerances import DEFAULT, Tolerances

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "torch"


@dataclass(frozen=True)
class Case:
    """One row of an op's test table: what to call it with, on inputs of one dtype."""

    label: str
    make: Callable[[torch.dtype, torch.Generator], tuple[Any, ...]]
    """Positional arguments, on the CPU; the generator makes them repeatable."""


@dataclass(frozen=True)
class Provider:
    """One implementation of an op."""

    name: str
    function: Callable[..., Any]
    needs: str
    """What `supported` asks for, as it reads after "needs "."""
    supported: Callable[[torch.device], bool]
    supports: Callable[..., bool] | None
    """Whether it can run one call; None: any."""
    prepare: Callable[..., tuple[Any, ...]] | None
    """From the reference's arguments to this provider's, where these differ (a packed weight)."""
    batch_invariant: bool = True
    """A row's bits depend on that row alone (in attention: once the plan fixes `split_tokens`)."""


class Op(Generic[P, R]):
    """Callable; each call goes to the first provider of the resolved order that supports it.

    Before `backend.resolve` the order holds the reference alone.
    """

    def __init__(
        self, reference: Callable[P, R], cases: Sequence[Case], tolerances: Tolerances, composed: bool = False
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.cases = cases
        self.tolerances = tolerances
        self.composed = composed
        """Whether the reference calls other ops, each with providers of its own, and no torch."""
        self.__doc__ = reference.__doc__
        self.providers: dict[str, Provider] = {
            REFERENCE: Provider(REFERENCE, reference, "nothing", lambda device: True, None, None)
        }
        self._preferred: tuple[Provider, ...] = ()
        self.ran_reference = False
        """Whether a call came to the reference, and so to torch, since the order was set."""

    def provider(
        self,
        name: str,
        *,
        needs: str,
        supported: Callable[[torch.device], bool],
        supports: Callable[P, bool] | None = None,
        prepare: Callable[P, tuple[Any, ...]] | None = None,
        batch_invariant: bool = True,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register the decorated function; raises ValueError for a name taken."""
        if name in self.providers:
            raise ValueError(f"op {self.name} already has a provider {name}")

        def register(function: Callable[P, R]) -> Callable[P, R]:
            self.providers[name] = Provider(
                name, function, needs, supported, supports, prepare, batch_invariant
            )
            return function

        return register

    def use(self, names: Sequence[str]) -> None:
        """Set the order; the reference comes last whether named or not."""
        self._preferred = tuple(self.providers[name] for name in names if name != REFERENCE)
        self.ran_reference = False

    @property
    def order(self) -> tuple[str, ...]:
        """Names in the order they are asked."""
        return (*(provider.name for provider in self._preferred), REFERENCE)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        for provider in self._preferred:
            if provider.supports is None or provider.supports(*args, **kwargs):
                result: R = provider.function(*args, **kwargs)
                return result
        self.ran_reference = not self.composed
        return self.reference(*args, **kwargs)


REGISTRY: dict[str, Op[..., Any]] = {}


def op(
    cases: Sequence[Case], tolerances: Tolerances = DEFAULT, composed: bool = False
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make the decorated function an op and enter it into `REGISTRY`.

    `composed`: it calls other ops, and torch through these alone.
    """

    def register(reference: Callable[P, R]) -> Op[P, R]:
        made = Op(reference, cases, tolerances, composed)
        if made.name in REGISTRY:
            raise ValueError(f"there are two ops named {made.name}")
        REGISTRY[made.name] = made
        return made

    return register
