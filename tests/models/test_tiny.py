"""The tiny models that other rooms' tests stand on: a folder with weights and tokenizer, the same for the same seed."""

from pathlib import Path

import numpy as np

from burnish.models import weights
from burnish.testing.tiny import tiny_config, write_tiny_model
from burnish.text.tokenizer import Tokenizer


def test_a_tiny_folder_has_weights_and_a_tokenizer_of_one_size(tmp_path: Path) -> None:
    written = write_tiny_model(tmp_path, config=tiny_config("qwen3"), alphabet="0123456789+=")
    config, params = weights.load(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert config == written and config.family == "qwen3"
    assert params["embed"].shape[0] == tokenizer.vocab_size == config.vocab_size
    assert tokenizer.decode(tokenizer.encode("12+7=")) == "12+7="


def test_seed_and_scale_do_what_they_say(tmp_path: Path) -> None:
    options = {"one": (0, 1.0), "again": (0, 1.0), "other": (1, 1.0), "louder": (0, 5.0)}
    embeddings = {}
    for name, (seed, scale) in options.items():
        write_tiny_model(tmp_path / name, seed=seed, scale=scale)
        embeddings[name] = np.asarray(weights.load(tmp_path / name)[1]["embed"])
    np.testing.assert_array_equal(embeddings["one"], embeddings["again"])
    assert not np.array_equal(embeddings["one"], embeddings["other"])
    np.testing.assert_allclose(embeddings["louder"], 5 * embeddings["one"], rtol=1e-6)
