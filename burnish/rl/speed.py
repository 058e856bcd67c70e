"""How much of the hardware an update makes use of. Owns the count of a model's operations; the learner reports what comes out.

Model flops, as PaLM's appendix B counts them (Chowdhery et al., 2022, arXiv:2204.02311): forward and backward pass of every row that is
trained on, each product once, whatever is recomputed or padded. Under an adapter the backward pass has no gradients of the frozen matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from burnish.models.config import ModelConfig
from burnish.observe.devices import peak_flops
from burnish.rl.cluster import RLCluster
from burnish.types import Group


def forward_flops(config: ModelConfig, *, lengths: Sequence[int], scored: int) -> float:
    """Of one pass over rows of these lengths, of which `scored` ids need the head's logits."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = 2 * config.width * (heads + kv_heads) + 3 * config.width * config.mlp_width
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return config.num_layers * (2 * layer * sum(lengths) + 4 * heads * pairs) + 2 * config.width * config.vocab_size * scored


def utilisation(cluster: RLCluster, groups: Sequence[Group], seconds: float, *, iterations: int) -> dict[str, float]:
    """`perf/train_flops_per_second` and, on devices whose peak is known, `perf/mfu`. seconds: of the step's updates."""
    episodes = [t for group in groups for t in group.trajectories]
    forward = forward_flops(cluster.model.config, lengths=[len(t.ids) for t in episodes], scored=sum(t.num_sampled for t in episodes))
    passes = 3 if cluster.adapter_scale is None else 2
    found = {"perf/train_flops_per_second": passes * iterations * forward / max(seconds, 1e-9)}
    devices = jax.local_devices()[:1] if cluster.mesh is None else list(cluster.mesh.devices.flat)
    if (peak := peak_flops(devices[0].device_kind)) is not None:
        found["perf/mfu"] = found["perf/train_flops_per_second"] / (peak * len(devices))
    return found


__all__ = ["forward_flops", "utilisation"]
