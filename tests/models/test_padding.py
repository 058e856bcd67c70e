"""B063: padding before or after a sequence changes none of its numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.models.attention import Visibility
from burnish.models.transformer import forward, init
from burnish.testing.tiny import tiny_config

IDS = np.array([5, 9, 2, 7, 7, 3], np.int32)


@pytest.mark.parametrize(("left", "right"), [(1, 0), (3, 0), (7, 0), (0, 1), (0, 7), (3, 4)])
def test_b063_pads_on_either_side_change_nothing(left: int, right: int) -> None:
    config = tiny_config("llama")
    params = init(config, jax.random.key(0))

    def hidden(left: int, right: int) -> np.ndarray:
        row = [np.pad(x, (left, right))[None] for x in (IDS, np.arange(len(IDS), dtype=np.int32), np.ones(len(IDS), np.int32))]
        tokens, positions, segments = (jnp.asarray(x) for x in row)
        out = forward(config, params, tokens, positions, Visibility(segments, jnp.zeros_like(segments)))
        return np.asarray(out[0, left : left + len(IDS)])

    np.testing.assert_allclose(hidden(left, right), hidden(0, 0), atol=1e-5)
