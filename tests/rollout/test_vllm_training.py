"""A whole run samples from a vLLM double: every version arrives, under its number, and is what was trained."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from burnish.config.errors import ConfigError, UserError
from burnish.config.loader import load_config
from burnish.config.schema import LoraConfig, RolloutConfig
from burnish.models import weights
from burnish.models.config import ModelConfig
from burnish.models.lora import merge
from burnish.models.model import Model
from burnish.models.transformer import Adapter
from burnish.rl.cluster import RLCluster
from burnish.testing.tiny import write_tiny_model
from tests.rl.runs import make_learner
from tests.rollout.test_vllm import unmarked
from tests.rollout.vllm_double import Double, served


class Reading(Double):
    """Reads what it is given, as a server would."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.read = config, list[Any]()

    async def load(self, request: Any) -> Any:
        self.read.append(weights.load_adapter((await request.json())["lora_path"], self.config))
        return await super().load(request)

    async def rpc(self, request: Any) -> Any:
        self.read.append(weights.load((await request.json())["kwargs"]["weights_path"])[1])
        return await super().rpc(request)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    write_tiny_model(tmp_path / "tiny")
    return Model.load(tmp_path / "tiny")


@pytest.mark.parametrize("push", ["adapter", "merged", "model"])
def test_each_step_samples_from_the_version_it_should(model: Model, push: str) -> None:
    double = Reading(model.config)
    lora = None if push == "model" else LoraConfig(rank=2)
    with served(double) as url:
        options = {"urls": [url], "weights": "merged" if push == "merged" else "adapter"}
        learner = make_learner(
            model, lora=lora, rollout={"engine": "vllm", "options": options, "max_prompt_tokens": 32}, training={"max_steps": 2}
        )
        try:
            learner.train()
            trained, scale = learner.cluster.state.trainable, learner.cluster.adapter_scale
        finally:
            learner.close()
    sampled = [body["cache_salt"] for body in double.answered if len(body["token_ids"]) > 1]
    assert unmarked(sampled) == ["burnish-0-1"] * 16 + ["burnish-1-2"] * 16 and len(double.read) == 3
    last = double.read[-1]
    if push == "adapter":
        assert double.most_adapters == 2 and last.scale == scale
        expected, found = trained, last.pairs
    elif push == "merged":
        assert scale is not None
        expected, found = merge(model.params, Adapter(trained, scale)), last
    else:
        expected, found = trained, last
    for left, right in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("vlm", {}, "there is no engine `vlm`; did you mean `vllm`?; known: native, vllm, sglang, burnish, scripted, `my_pkg.mod:Engine`"),
        ("vllm", {"url": ["http://x"]}, "options of the engine `vllm`: `url`: there is no such option; did you mean `urls`?"),
        ("vllm", {"urls": ["localhost:80"]}, "`urls.0`: String should match pattern"),
        ("vllm", {"restarts": -1}, "`restarts`: Input should be greater than or equal to 0"),
        ("native", {"urls": []}, "`options` urls are for other engines"),
    ],
)
def test_mistakes_are_told_with_the_rest_of_the_configuration(tmp_path: Path, engine: str, options: dict[str, Any], message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"rollout: {{engine: {engine}, options: {options}}}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file, (), {})
    assert message in str(raised.value)


def test_what_an_engine_in_another_process_cannot_do_is_refused(model: Model) -> None:
    with pytest.raises(ValueError, match="`weights: lent` lends the actor's arrays, which the engine `vllm` can't borrow"):
        RolloutConfig(engine="vllm", weights="lent")
    with pytest.raises(UserError, match="cluster.rollout gives devices to the engine, but the engine `vllm` has its own"):
        make_learner(model, rollout={"engine": "vllm"}, cluster={"rollout": {"devices": 2}})
    with pytest.raises(UserError, match="model.lora.quantize is int8, but the engine `vllm` samples from the base as it is stored"):
        make_learner(model, rollout={"engine": "vllm"}, lora=LoraConfig(rank=2, quantize="int8"))
    with pytest.raises(UserError, match="there is no engine `./nowhere.py:Engine`|there is no file ./nowhere.py"):
        RLCluster(model, rollout=RolloutConfig(engine="./nowhere.py:Engine"))
