"""Keys: two headers, several keys, and what is kept of them."""

import pytest

from frontend.auth import ApiKeys
from frontend.errors import RequestError


def test_without_keys_everybody_is_the_same_caller() -> None:
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
def test_a_right_key_opens(headers: dict[str, str]) -> None:
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
def test_anything_else_is_refused(headers: dict[str, str]) -> None:
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
def test_an_empty_key_is_a_mistake(configured: str) -> None:
    with pytest.raises(ValueError, match="--api-key"):
        ApiKeys(configured)
