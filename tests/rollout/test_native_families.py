"""The engine decodes families whose layers differ as the full forward pass does: windows, two RoPEs, caps, unrotated layers, experts."""

import jax.numpy as jnp
import numpy as np
import pytest

from burnish.models.transformer import capped
from burnish.rollout.native.engine import NativeEngine
from burnish.testing.check_family import lively_params
from burnish.testing.tiny import tiny_config
from tests.rollout.reference import OPTIONS, forward_logits, generate, log_softmax, request, run


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "smollm3", "mixtral"])
def test_log_probs_are_those_of_the_full_forward_pass(family: str) -> None:
    """Prompts shorter and longer than the window of 5, continued beyond it."""
    config = tiny_config(family)
    params = lively_params(config)
    prompts = [[3, 1, 4], [*range(7, 30)]]
    engine = NativeEngine(config, params, **OPTIONS)
    try:
        outs = generate(engine, [request(prompt, (i,), max_tokens=10) for i, prompt in enumerate(prompts)])
    finally:
        run(engine.close())
    for prompt, out in zip(prompts, outs, strict=True):
        ids = [*prompt, *out.ids.tolist()]
        logits = np.asarray(capped(jnp.asarray(forward_logits(params, ids, config=config)), config.logit_cap))
        wanted = log_softmax(logits)[np.arange(len(prompt), len(ids)) - 1, out.ids]
        np.testing.assert_allclose(out.logps, wanted, atol=1e-4)
        assert wanted.min() < -0.1, "not all certain"
