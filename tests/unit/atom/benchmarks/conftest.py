"""What the tests of the serving benchmark share."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from atom.benchmarks.serving.datasets import TextSource
from atom.benchmarks.serving.flags import check, make_parser
from atom.benchmarks.serving.tokenizer import load_tokenizer
from tests.helpers.checkpoints import tiny_hf_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_tokenizer.write(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def source(tokenizer_directory: Path) -> TextSource:
    tokenizer = load_tokenizer(str(tokenizer_directory))
    return TextSource(tokenizer, tokenizer.vocab_size)


@pytest.fixture
def parse(tokenizer_directory: Path) -> Callable[..., argparse.Namespace]:
    """Checked flags; the model is the tiny tokenizer's directory."""

    def parse(*flags: object) -> argparse.Namespace:
        args = make_parser().parse_args(["--model", str(tokenizer_directory), *map(str, flags)])
        check(args)
        return args

    return parse
