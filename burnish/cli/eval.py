"""`burnish eval CONFIG|RUN [KEY=VALUE ...]`: sample the held-out prompts and grade them, as `training.eval_every` does on its way.

With `--samples K` each is sampled K times at the training temperature: avg@K (mean reward), pass@k for k up to K (the chance that one of k
earns 1), and, where an answer is one text, maj@K (the reward of the answer that most give). `--on CONFIG`, as often as you like, evaluates
the same model in the environments, on the data and with the rewards of other configurations.

Of a run on rows of data (`burnish sft`, `dpo`, `distill`, `reward-model`): its held-out rows' loss and what else is measured, with what its
newest checkpoint holds; `data.eval` may name other rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.cli.options import add_config_arguments, load
from burnish.config.errors import UserError

if TYPE_CHECKING:
    from burnish.config.loader import Resolved
    from burnish.config.schema import Config
    from burnish.rl.evaluation import Evaluation
    from burnish.rl.learner import RLLearner

FOREIGN = ("data", "rewards", "environment", "agent")
"""Sections that `--on` takes from another configuration; of its `rollout` the limits come too."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("eval", help="evaluate a configuration's model, or what a run has made of it", description=__doc__)
    add_config_arguments(parser)
    parser.add_argument("--samples", type=int, metavar="K", help="samples of each prompt; without it one, as rollout.evaluation says")
    parser.add_argument("--temperature", type=float, metavar="T", help="of those samples (default: rollout.sampling.temperature)")
    parser.add_argument("--on", action="append", default=[], metavar="CONFIG", help="evaluate on this configuration's tasks instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.samples is None and args.temperature is not None:
        raise UserError("--temperature is of --samples; for one sample each set rollout.evaluation.temperature")
    if args.samples is not None and args.samples < 1:
        raise UserError(f"--samples must be at least 1, got {args.samples}")
    run_folder = Path(args.config) if args.config and Path(args.config).is_dir() else None
    if run_folder is not None:
        args.config = str(run_folder / "config.yaml")
        from burnish.config.tuning import command_of

        command = command_of(run_folder)
        if command != "train":
            from burnish.cli.rows import evaluate_run

            if args.samples is not None or args.on:
                raise UserError(
                    f"{run_folder} is a run of `burnish {command}`, on rows of data: --samples and --on are for tasks that are sampled"
                )
            return evaluate_run(args, run_folder, command)

    from burnish.config.schema import Config

    resolved = load(args, Config)

    from burnish.cli.build import build_learner
    from burnish.cli.result import load_result
    from burnish.models.model import Model

    loaded: list[Model] = []

    def load_model(base: Path, **options: Any) -> Model:
        if not loaded:
            loaded.append(Model.load(base, **options) if run_folder is None else load_result(run_folder, **options))
        return loaded[0]

    # Nothing is trained here, so there is no adapter beside the weights: a run's own is merged into them. And this process is alone.
    model = resolved.config.model.model_copy(update={"lora": None})
    cluster = resolved.config.cluster.model_copy(update={"distributed": None})
    resolved = dataclasses.replace(resolved, config=resolved.config.model_copy(update={"model": model, "cluster": cluster}))
    plans = [(None, resolved)] if not args.on else [(path, _on(resolved, path)) for path in args.on]
    for path, plan in plans:
        with build_learner(plan, sinks=list, report=lambda line: print(line, flush=True), load_model=load_model) as learner:
            _show(learner, plan.config, args, "" if path is None else f"{path}: ")
    return 0


def _on(resolved: Resolved[Config], path: str) -> Resolved[Config]:
    """The model and the cluster of one configuration, the tasks of another."""
    from burnish.config import loader
    from burnish.config.schema import Config

    other = loader.load(Config, Path(path), (), {})
    for note in other.notes:
        print(f"note: {note}", file=sys.stderr)
    theirs: dict[str, Any] = {name: getattr(other.config, name) for name in FOREIGN}
    sampling = other.config.rollout.sampling.model_copy(update={"temperature": resolved.config.rollout.sampling.temperature})
    limits = {name: getattr(other.config.rollout, name) for name in ("max_prompt_tokens", "max_episode_tokens", "overlong_prompts")}
    rollout = resolved.config.rollout.model_copy(update=limits | {"sampling": sampling})
    sizes = ("mini_batch_size", "train_micro_batch_size", "rollout_micro_batch_size", "compute_logps_micro_batch_size")
    # Nothing is trained: their rows needn't fill a batch of ours.
    training = resolved.config.training.model_copy(update=dict.fromkeys(sizes) | {"batch_size": 1})
    changed = resolved.config.model_copy(update=theirs | {"rollout": rollout, "training": training})
    return dataclasses.replace(resolved, config=changed, base=other.base)


def _show(learner: RLLearner, config: Config, args: argparse.Namespace, where: str) -> None:
    if args.samples is None:
        for label, evaluation in learner.evaluate().items():
            print(f"{where}{label}: {100 * evaluation.accuracy:.1f} % of {len(evaluation.trajectories)}")
        return
    samples = learner.sample(args.samples, temperature=args.temperature)
    single = config.environment.env in ("TaskEnvironment", "ToolEnvironment")
    for name, value in estimates(samples, votes=single).items():
        print(f"{where}{name}: {100 * value:.1f} % of {len(samples[0].rewards)} prompts")


def estimates(samples: Sequence[Evaluation], *, votes: bool) -> dict[str, float]:
    """avg@K, pass@k for k = 1, 2, 4 … K, and maj@K if the answers can be counted as votes."""
    import numpy as np

    from burnish.rewards.estimates import answer_key, avg_at_k, maj_at_k, pass_at_k

    rewards, count = np.stack([sample.rewards for sample in samples], axis=1), len(samples)
    found = {f"avg@{count}": avg_at_k(rewards)}
    found |= {f"pass@{k}": pass_at_k(rewards, k) for k in sorted({*(2**n for n in range(count.bit_length()) if 2**n <= count), count})}
    if votes:
        texts = [[answer_key(t.final_text) for t in task] for task in zip(*(sample.trajectories for sample in samples), strict=True)]
        found[f"maj@{count}"] = maj_at_k(rewards, texts)
    return found
