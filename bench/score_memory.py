"""Memory of log-probs and their gradient: SmolLM2-135M's sizes, every weight trained in f32, every id but a row's first scored.

    python bench/score_memory.py

Each case runs in a process of its own, whose peak of resident memory is taken: interpreter, compiler and all. Parameters and gradients are
taken off (`above_gb`). Limits: 1.2 GB for rows of [32, 256], 0.3 GB more for [1, 8192], as many tokens in one row. Beside it stands what
the pass alone adds to the process that holds the parameters and the compiled program, without the gradients (`pass_gb`). Writes
bench/baselines/score_memory.json; exits with 1 where a limit isn't kept.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "baselines" / "score_memory.json"
CASES = ((32, 256), (1, 8192))
LIMIT_GB, MORE_FOR_A_LONG_ROW_GB = 1.2, 0.3


def main() -> None:
    found = [
        json.loads(subprocess.run([sys.executable, __file__, *map(str, case)], check=True, capture_output=True).stdout) for case in CASES
    ]
    many, long = (case["above_gb"] for case in found)
    record = {
        "what": "log-probs and their gradient, SmolLM2-135M's sizes, vocabulary 49,152, every weight trained in f32",
        "date": date.today().isoformat(),
        "command": "python bench/score_memory.py",
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "numpy")} | {"python": platform.python_version()},
        "limits_gb": {"[32, 256]": LIMIT_GB, "[1, 8192] above that": MORE_FOR_A_LONG_ROW_GB},
        "cases": found,
        "kept": bool(many <= LIMIT_GB and long <= many + MORE_FOR_A_LONG_ROW_GB),
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    sys.exit(0 if record["kept"] else 1)


def measure(rows: int, length: int) -> dict[str, Any]:
    """One case, in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from burnish.models import transformer
    from burnish.models.locate import locate
    from burnish.models.weights import load_config
    from burnish.rl.batch import TokenBatch
    from burnish.train.score import HeadOptions, entropy, policy_scores

    config = load_config(locate("smollm2-135m"))
    params = jax.jit(lambda key: transformer.init(config, key))(jax.random.key(0))
    size_gb = sum(x.nbytes for x in jax.tree.leaves(params)) / 1e9
    rng, scored = np.random.default_rng(0), (rows, length - 1)
    tokens = rng.integers(0, config.vocab_size, (rows, length)).astype(np.int32)
    columns = np.broadcast_to(np.arange(length - 1, dtype=np.int32), scored)
    row = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], scored)
    numbers = {name: np.zeros(scored, np.float32) for name in ("returns", "sampler_logps")}
    batch = TokenBatch(
        tokens=tokens,
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
        segments=np.ones_like(tokens),
        parents=np.zeros_like(tokens),
        columns=columns,
        own_columns=columns + 1,
        target_ids=tokens[:, 1:],
        mask=np.ones(scored, bool),
        sequences=row,
        prompts_index=row,
        sequence_tokens=np.full(scored, length - 1, np.int32),
        prompt_tokens=np.full(scored, length - 1, np.int32),
        advantages=rng.normal(size=scored).astype(np.float32),
        temperatures=np.ones(scored, np.float32),
        kept_ids=None,
        num_sequences=rows,
        num_prompts=rows,
        **numbers,
    )
    options = HeadOptions(chunk=128, train_head=True, head_fn=entropy)

    def loss(params: Any, batch: TokenBatch) -> tuple[Any, Any]:
        logps, extras = policy_scores(config, params, batch, options=options, remat="nested")
        return -jnp.sum(logps * batch.advantages), jnp.sum(extras["entropy"])

    compiled = jax.jit(jax.grad(loss, has_aux=True)).lower(params, batch).compile()
    planned = compiled.memory_analysis()
    assert planned is not None
    before = _resident_gb()
    gradients = jax.block_until_ready(compiled(params, batch))[0]
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradients))
    return {
        "rows": rows,
        "tokens": length,
        "peak_gb": round(_peak_gb(), 3),
        "parameters_gb": round(size_gb, 3),
        "gradients_gb": round(size_gb, 3),
        "above_gb": round(_peak_gb() - 2 * size_gb, 3),
        "resident_before_the_pass_gb": round(before, 3),
        "pass_gb": round(_peak_gb() - before - size_gb, 3),
        "compiler_says_temporary_gb": round(planned.temp_size_in_bytes / 1e9, 3),
    }


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def _resident_gb() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize() / 1e9


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
    else:
        main()
