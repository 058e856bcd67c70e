"""Gemma 3 270M, as its GGUF holds it: the engine's greedy continuations are those of transformers on the same folder.

One prompt is longer than the windows of its layers (512), so that what is beyond them shows. `make test-gemma3`.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from burnish.models.locate import locate
from burnish.models.weights import load
from burnish.rollout.native.engine import NativeEngine
from burnish.text.tokenizer import Tokenizer
from tests.rollout.reference import generate, request, run

pytestmark = [pytest.mark.gemma3, pytest.mark.filterwarnings("default")]

PROMPTS = ("The capital of France is", "Once upon a time", "def fibonacci(n):\n")
LONG = "The lighthouse keeper wrote down every ship that passed: its name, its flag, the weather and the hour. "
NEW_TOKENS = 24


def test_greedy_continuations_equal_those_of_transformers() -> None:
    folder = locate("gemma3-270m")
    tokenizer = Tokenizer.load(folder)
    prompts = [[2, *tokenizer.encode(text)] for text in (*PROMPTS, LONG * 30)]
    assert len(prompts[-1]) > 600
    config, params = load(folder)
    assert {kind.window for kind in config.layer_kinds} == {512, None} and config.rope.theta == 1e6
    engine = NativeEngine(config, params, decode_text=str, context=1024, slots=4, prefill_rows=1)
    try:
        ours = [out.ids.tolist() for out in generate(engine, [request(ids, max_tokens=NEW_TOKENS, temperature=0.0) for ids in prompts])]
    finally:
        run(engine.close())
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        wanted = [theirs.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]
    assert ours == wanted
    assert all(np.unique(ids).size > 3 for ids in ours), "continuations that say something"
