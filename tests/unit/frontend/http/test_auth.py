"""API keys: both headers, several keys, and their digests."""

import pytest

from frontend.errors import RequestError
from frontend.http.auth import ApiKeys


def test_without_keys_all_callers_share_one_tenant() -> None:
    keys = ApiKeys(None)
    assert keys.tenant({}) == keys.tenant({"Authorization": "Bearer whatever"}) == ""


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer one"},
        {"Authorization": "bearer  one "},
        {"x-api-key": "one"},
        {"Authorization": "Bearer dummy", "x-api-key": "one"},
        {"Authorization": "Bearer one", "x-api-key": "dummy"},
    ],
)
def test_a_valid_key_is_accepted(headers: dict[str, str]) -> None:
    assert ApiKeys("one").tenant(headers) == ""
    assert ApiKeys("zero, one ,two").tenant(headers) == ApiKeys("one,two").tenant({"x-api-key": "one"})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": "one"},
        {"Authorization": "Basic one"},
        {"Authorization": "Bearer one,two"},
        {"Authorization": "Bearer ONE"},
        {"x-api-key": ""},
        {"x-api-key": "\udcff"},
    ],
)
def test_other_keys_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(RequestError) as caught:
        ApiKeys("one,two").tenant(headers)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_tenants_differ_by_key_and_do_not_show_it() -> None:
    keys = ApiKeys("first-secret,second-secret")
    tenants = [keys.tenant({"x-api-key": key}) for key in ("first-secret", "second-secret")]
    assert len(set(tenants)) == 2
    assert all(len(tenant) == 16 and "secret" not in tenant for tenant in tenants)


def test_no_attribute_holds_a_key() -> None:
    assert "secret" not in repr(vars(ApiKeys("first-secret,second-secret")))


@pytest.mark.parametrize("configured", ["", " ", "a,,b", "a,", ","])
def test_an_empty_key_is_invalid(configured: str) -> None:
    with pytest.raises(ValueError, match="--api-key"):
        ApiKeys(configured)
