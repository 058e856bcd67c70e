"""`burnish train CONFIG [KEY=VALUE ...]`: reinforcement learning as a configuration describes it."""

from __future__ import annotations

import argparse
from typing import Any

from burnish.cli.options import add_config_arguments, load


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("train", help="train a policy by reinforcement learning", description=__doc__)
    add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    resolved = load(args)

    from burnish.cli.build import anchored, build_learner
    from burnish.config.loader import dump_config
    from burnish.observe.display import ProgressSink
    from burnish.observe.run_folder import RunFolder
    from burnish.observe.sinks import JsonlSink, Sink
    from burnish.observe.trace import write_jsonl
    from burnish.observe.transcripts import TranscriptSink
    from burnish.rl.evaluation import paired_change

    config = resolved.config
    opened: list[RunFolder] = []

    def sinks() -> list[Sink]:
        folder = RunFolder(config.run.folder, config.run.name)
        opened.append(folder)
        folder.write_config(dump_config(anchored(resolved)))
        found: list[Sink] = [JsonlSink(folder), ProgressSink(sample_every=config.observe.sample_every, live=config.observe.progress)]
        return [*found, TranscriptSink(folder)] if config.observe.transcripts else found

    try:
        learner = build_learner(resolved, sinks=sinks, report=lambda line: print(line, flush=True))
        folder = opened[0]
        every = config.checkpoint.every

        def save(step: int) -> None:
            if every is not None and step % every == 0:
                learner.save(folder.checkpoints_path, step=step)

        result = learner.train(on_step=save)
        if result.steps and (every is None or result.steps % every):  # also where the data ended before max_steps
            learner.save(folder.checkpoints_path, step=result.steps)
        exported = learner.cluster.export(folder.path)
        write_jsonl(folder.trace_path)
        before, after = result.evaluations.get(0, {}), result.evaluations.get(result.steps, {})
        for label in before.keys() & after.keys():
            change = paired_change(before[label], after[label], clusters=learner.held_out_clusters)
            print(f"{label}: {100 * change.difference:+.1f} points (95 % interval {100 * change.low:+.1f} to {100 * change.high:+.1f})")
        folder.complete()
    except BaseException as error:
        for folder in opened:
            folder.__exit__(type(error), error, error.__traceback__)
        raise
    print(f"{result.steps} steps done; {exported} holds the result. Talk to it: burnish chat {folder.path}")
    return 0
