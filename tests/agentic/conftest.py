from pathlib import Path

import pytest

from burnish.testing.byte_tokenizer import make_byte_tokenizer
from burnish.text.codec import Codec


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """The byte tokenizer with ChatML."""
    folder: Path = tmp_path_factory.mktemp("bytes")
    make_byte_tokenizer(folder)
    return Codec.load(folder)
