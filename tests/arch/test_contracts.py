"""Every call of AITER and MORI fits the signatures of their published packages.

The signatures are read from the wheels by `make contract-signatures`.
"""

import ast
from functools import cache

import pytest

from tests.helpers.parallel.signatures import in_development, parsed, published
from tests.helpers.source import ROOT, package_files, text_of
from tools.contract_signatures import SIGNATURES, UNPUBLISHED
from tools.library_calls import LIBRARIES, Use, package_uses, uses

AS_OF_THE_NEXT = (*UNPUBLISHED, "aiter.fused_allreduce_rmsnorm")
"""Called in AITER's next release alone: one is new, the other computed with the whole part of epsilon."""


def bind(use: Use, signatures: dict[str, str]) -> None:
    """Raises TypeError for a call that does not fit, KeyError for an unknown name."""
    if use.name not in signatures:
        raise KeyError(f"{use.place}: {use.name} is not in {SIGNATURES}: run make contract-signatures")
    if use.call is None:
        return
    text, keywords = signatures[use.name], [each.arg for each in use.call.keywords]
    assert text != "constant", f"{use.place}: {use.name} cannot be called"
    if len(use.call.args) + len(keywords) > 1:
        assert not use.call.args, f"{use.place}: parameters move between versions: name them"
    parsed(text).bind(*use.call.args, **dict.fromkeys(map(str, keywords)))


def fits(use: Use, signatures: dict[str, str]) -> bool:
    """Whether `bind` takes it."""
    try:
        bind(use, signatures)
    except TypeError:
        return False
    return True


@cache
def our_uses() -> list[Use]:
    return package_uses([ROOT / path for path in package_files()])


def test_every_call_fits_its_published_signature() -> None:
    """A call that does not is for the next release, and another one of the same function fits."""
    signatures, next_release, found = published(), in_development(), our_uses()
    for use in found:
        if use.name in AS_OF_THE_NEXT:
            bind(use, next_release)
    names, found = {use.name for use in found}, [use for use in found if use.name not in AS_OF_THE_NEXT]
    fit = {use.name for use in found if use.name in signatures and fits(use, signatures)}
    for use in found:
        bind(use, signatures if use.name not in fit or fits(use, signatures) else next_release)
    assert names - set(UNPUBLISHED) == set(signatures), "signatures that nothing uses"


def test_calls_fit_the_next_release_as_well() -> None:
    """One call serves both, since AITER's parameters move between releases, or there is one for each."""
    signatures = in_development()
    assert set(signatures) <= set(published()) | set(UNPUBLISHED)
    calls = [use for use in our_uses() if use.name in signatures and use.call is not None]
    fit = {use.name for use in calls if fits(use, signatures)}
    for use in calls:
        bind(use, signatures if use.name not in fit or fits(use, signatures) else published())


def test_nothing_uses_a_library_unseen() -> None:
    """Each file that names a library in an import is one in which uses were found."""
    for path in package_files():
        source = text_of(path)
        if not any(name in source for name in LIBRARIES):
            continue
        names = {
            each.split(".")[0]
            for node in ast.walk(ast.parse(source))
            for each in (
                [alias.name for alias in node.names] if isinstance(node, ast.Import)
                else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            )
        }  # fmt: skip
        assert not names & set(LIBRARIES) or uses(source, path)


GOOD = """
import mori.ops
from mori.shmem import shmem_get_unique_id as unique

class Form:
    def open(self):
        unique()
        op: mori.ops.EpDispatchCombineOp | None = None
        made = mori.ops.EpDispatchCombineOp(config=1)
        made.combine(input=1, weights=None, indices=2)
        return op.dispatch(input=1, weights=2, scales=None, indices=3)
"""


def test_calls_are_found_through_modules_names_and_objects() -> None:
    names = [use.name for use in uses(GOOD, "form.py") if use.call is not None]
    op = "mori.ops.EpDispatchCombineOp"
    assert names == ["mori.shmem.shmem_get_unique_id", op, f"{op}.combine", f"{op}.dispatch"]
    for use in uses(GOOD, "form.py"):
        bind(use, published())


@pytest.mark.parametrize(
    ("old", "new", "error", "text"),
    [
        ("scales=None", "scale=None", TypeError, "scale"),
        ("config=1", "", TypeError, "config"),
        ("scales=None, ", "", TypeError, "scales"),
        ("input=1, weights=2, scales=None, indices=3", "1, 2, None, 3", AssertionError, "name them"),
        (".dispatch(", ".despatch(", KeyError, "run make contract-signatures"),
    ],
)
def test_a_call_that_does_not_fit_is_found(old: str, new: str, error: type[Exception], text: str) -> None:
    signatures = published()
    with pytest.raises(error, match=text):
        for use in uses(GOOD.replace(old, new), "form.py"):
            bind(use, signatures)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("mori.ops.EpDispatchCombineOp(**options)", "unpacked arguments"),
        ("importlib.import_module('mori.io')", "by name"),
    ],
)
def test_code_that_hides_a_call_is_refused(line: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        uses(f"import importlib\nimport mori.ops\n{line}\n", "form.py")


def test_a_module_that_is_passed_on_has_no_signature() -> None:
    (use,) = uses("import mori.shmem\nprint(mori.shmem)\n", "form.py")
    with pytest.raises(KeyError, match=r"mori\.shmem is not in"):
        bind(use, published())
