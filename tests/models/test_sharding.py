"""One table places every leaf, and a mesh that doesn't fit is refused in words."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from burnish.config.errors import UserError
from burnish.config.schema import LoraConfig
from burnish.models import scalar_head
from burnish.models.lora import adapter_spec
from burnish.models.nnx import from_nnx
from burnish.models.quant import quantised_spec
from burnish.models.sharding import RULES, batch_sharding, check_mesh, shardings
from burnish.models.transformer import ParamSpec, spec
from burnish.testing.tiny import tiny_config, write_tiny_model


def mesh_of(**axes: int) -> Mesh:
    devices = np.asarray(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def test_every_logical_axis_has_its_rule(tmp_path: Path) -> None:
    specs = [spec(tiny_config(family)) for family in ("llama", "qwen2", "qwen3", "mixtral")]
    specs.append(adapter_spec(tiny_config(), rank=4, targets=LoraConfig().targets))
    specs.append(scalar_head.spec(tiny_config()))
    specs.append(quantised_spec(spec(tiny_config()), "nf4"))
    write_tiny_model(tmp_path)
    embed = nnx.Embed(11, 4, rngs=nnx.Rngs(0))
    module = from_nnx(embed, tmp_path, hidden=lambda m, tokens, *_: m(tokens), head=lambda m: m.embedding[...], max_positions=8)
    specs.append(spec(module.config))
    named = {axis for leaf in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec)) for axis in leaf.axes}
    assert named == set(RULES)


def test_where_the_leaves_go() -> None:
    placed = shardings(spec(tiny_config("qwen3")), mesh_of(data=2, fsdp=2, tp=2))
    assert placed["embed"].spec == PartitionSpec("tp", "fsdp")
    assert placed["layers"]["q"].spec == PartitionSpec(None, "fsdp", "tp")
    assert placed["layers"]["down"].spec == PartitionSpec(None, "tp", "fsdp")
    assert placed["layers"]["q_norm"].spec == PartitionSpec(None, None)
    assert batch_sharding(mesh_of(data=2, fsdp=2, tp=2)).spec == PartitionSpec(("data", "fsdp"))


def test_axes_that_a_mesh_lacks_are_not_used() -> None:
    placed = shardings(spec(tiny_config()), mesh_of(data=4))
    assert all(part is None for leaf in jax.tree.leaves(placed) for part in leaf.spec)


def test_all_leaves_that_a_mesh_does_not_divide_are_listed() -> None:
    with pytest.raises(UserError) as error:
        shardings(spec(tiny_config(vocab_size=97)), mesh_of(tp=2))
    assert "embed: vocab 97 by tp=2" in str(error.value)
    with pytest.raises(UserError) as error:
        shardings(spec(tiny_config()), mesh_of(fsdp=3))
    assert "layers.q: embed 32 by fsdp=3" in str(error.value) and "layers.attn_norm" in str(error.value)


def test_a_mesh_that_would_cut_a_head_or_has_other_axes_is_refused() -> None:
    check_mesh(tiny_config(), mesh_of(data=2, tp=2))
    with pytest.raises(UserError, match="tp=4 doesn't divide num_kv_heads=2"):
        check_mesh(tiny_config(), mesh_of(tp=4))
    with pytest.raises(UserError, match="unknown mesh axes"):
        check_mesh(tiny_config(), mesh_of(model=2))
