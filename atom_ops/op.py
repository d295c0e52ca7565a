"""An op: one torch function, and faster providers of the same function.

The torch function defines the op, is the reference of its tests, and the fallback on every device.
A provider is a function with the same signature, registered next to its kernel with two checks:
`supported` tests the device once, when a worker starts; `supports` tests the arguments of a call.
Neither reads the environment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from atom_ops.tolerances import DEFAULT, Tolerance, Tolerances

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "torch"


@dataclass(frozen=True)
class Case:
    """One row of an op's test table: arguments of one call, for a given dtype."""

    label: str
    make: Callable[[torch.dtype, torch.Generator], tuple[Any, ...]]
    """Returns the positional arguments, on the CPU."""
    rounded: Tolerances | None = None
    """For providers that round the activations; None: they do not in this case."""


@dataclass(frozen=True)
class Provider:
    """One implementation of an op."""

    name: str
    function: Callable[..., Any]
    needs: str
    """What `supported` requires, as text after "it needs "."""
    supported: Callable[[torch.device], bool]
    supports: Callable[..., bool] | None
    """Whether it can run a call with these arguments; None: always."""
    prepare: Callable[..., tuple[Any, ...]] | None
    """Converts the reference's arguments to this provider's where they differ (a packed weight)."""
    pack: Callable[..., Any] | None = None
    """Converts a loaded weight, or an empty cache, to the layout that this provider reads; returns None where
    it has no layout for it."""
    batch_invariant: bool = True
    """A row's bits depend on that row alone (attention: if the plan sets `split_tokens`)."""
    quantizes_activations: bool = False
    """It rounds the activations to 8 bits for weights whose type allows it."""
    plan: Callable[..., Any] | None = None
    """How it runs a call with these arguments, which the function gets as `plan`; None: it cannot. Instead
    of `supports`, so that what is chosen for a call is chosen once."""


class Op(Generic[P, R]):
    """Callable; each call runs the first provider in the resolved order that supports it.

    Before `backend.resolve` that is the reference.
    """

    def __init__(
        self, reference: Callable[P, R], cases: Sequence[Case], tolerances: Tolerances, composed: bool = False
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.cases = cases
        self.tolerances = tolerances
        self.composed = composed
        """Whether the reference only calls other ops, each with providers of its own."""
        self.__doc__ = reference.__doc__
        self.providers: dict[str, Provider] = {
            REFERENCE: Provider(REFERENCE, reference, "nothing", lambda device: True, None, None)
        }
        self._preferred: tuple[Provider, ...] = ()
        self.ran_reference = False
        """Whether a call fell back to torch since the order was set."""

    def provider(
        self,
        name: str,
        *,
        needs: str,
        supported: Callable[[torch.device], bool],
        supports: Callable[P, bool] | None = None,
        prepare: Callable[P, tuple[Any, ...]] | None = None,
        pack: Callable[..., Any] | None = None,
        batch_invariant: bool = True,
        quantizes_activations: bool = False,
        plan: Callable[P, Any] | None = None,
    ) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """Register the decorated function; raises ValueError for a duplicate name.

        The function may take narrower types than the op (some types of weight), if `supports` checks them.
        """
        if name in self.providers:
            raise ValueError(f"op {self.name} already has a provider {name}")

        def register(function: Callable[..., R]) -> Callable[..., R]:
            self.providers[name] = Provider(
                name,
                function,
                needs,
                supported,
                supports if plan is None else (lambda *args, **kwargs: plan(*args, **kwargs) is not None),
                prepare,
                pack,
                batch_invariant,
                quantizes_activations,
                plan,
            )
            return function

        return register

    def tolerance(self, provider: Provider, case: Case, dtype: torch.dtype) -> Tolerance:
        """How much the provider's results may differ from the reference's in float32."""
        rounded = case.rounded if provider.quantizes_activations else None
        return (rounded or self.tolerances)[dtype]

    def use(self, names: Sequence[str]) -> None:
        """Set the order; the reference is always last."""
        self._preferred = tuple(self.providers[name] for name in names if name != REFERENCE)
        self.ran_reference = False

    @property
    def order(self) -> tuple[str, ...]:
        """Provider names, in order of preference."""
        return (*(provider.name for provider in self._preferred), REFERENCE)

    def pack(self, weight: Any, *role: Any) -> Any:
        """A loaded weight in the layout of the first provider that has its own; else the same weight.

        `role` says what the op uses the weight for, where that decides its layout. Called once for each
        weight at load, and for each empty cache, after `use`. The type of the result names its layout, or a
        field of it, so that `supports` can tell it from others.
        """
        packers = (provider.pack for provider in self._preferred if provider.pack is not None)
        packed = (pack(weight, *role) for pack in packers)
        return next((found for found in packed if found is not None), weight)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        for provider in self._preferred:
            if provider.plan is not None:
                plan = provider.plan(*args, **kwargs)
                if plan is not None:
                    planned: R = provider.function(*args, **kwargs, plan=plan)
                    return planned
            elif provider.supports is None or provider.supports(*args, **kwargs):
                result: R = provider.function(*args, **kwargs)
                return result
        self.ran_reference = not self.composed
        return self.reference(*args, **kwargs)


REGISTRY: dict[str, Op[..., Any]] = {}


def op(
    cases: Sequence[Case], tolerances: Tolerances = DEFAULT, composed: bool = False
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make the decorated function an op and add it to `REGISTRY`.

    `composed`: the function only calls other ops. Raises ValueError for a duplicate name.
    """

    def register(reference: Callable[P, R]) -> Op[P, R]:
        made = Op(reference, cases, tolerances, composed)
        if made.name in REGISTRY:
            raise ValueError(f"there are two ops named {made.name}")
        REGISTRY[made.name] = made
        return made

    return register
