"""The defaults of requests that an administrator sets."""

import pytest

from atom.shared.config.fields import ConfigError
from atom.shared.config.generation import generation_overrides


def test_sampling_parameters_are_taken() -> None:
    assert generation_overrides(None) == {}
    given = '{"temperature": 0.2, "top_k": 40, "min_p": 0.05}'
    assert generation_overrides(given) == {"temperature": 0.2, "top_k": 40, "min_p": 0.05}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"temperature": -1}', "temperature must be in"),
        ('{"temperature": null}', "temperature must be a finite number"),
        ('{"max_new_tokens": 9}', "'max_new_tokens' is not one of temperature"),
        ('{"top_k": 0.5}', "top_k must be an integer"),
    ],
)
def test_others_are_refused_with_the_flag(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--override-generation-config: {words}"):
        generation_overrides(text)
