"""Episodes of a run, kept so that its updates can be made again: what sampling ahead leaves to chance is then read, not sampled.

Owns the files `episodes/step_N.bin` of a run's folder, a step each: all its groups as `rl.wire` packs them. With staleness above 0 which
weights sampled a token depends on time; given the same episodes in the same order, an update is the same bit for bit. The producer asks
`Replayed` as it would ask the orchestrator; nothing is sampled, graded or played.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

from burnish.agentic.orchestrator import Draw
from burnish.config.errors import UserError
from burnish.observe.sinks import EvalReport, StepReport
from burnish.rl import wire
from burnish.types import Group, Trajectory

FOLDER = "episodes"


class EpisodeSink:
    """Writes a file for each step, whole or not at all."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._folder.mkdir(exist_ok=True)

    def step(self, report: StepReport) -> None:
        path = _file(self._folder, report.step)
        part = path.with_suffix(".part")
        part.write_bytes(wire.pack([(group.id, group.prompt.id, group.trajectories) for group in report.groups]))
        part.replace(path)

    def evaluation(self, report: EvalReport) -> None:
        """Held-out episodes are sampled again."""

    def rewind(self, step: int) -> None:
        """The run goes on after `step`: later ones are made again."""
        for path in self._folder.glob("step_*.bin"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def close(self) -> None:
        """Nothing is held open between reports."""


class Replayed:
    """The groups that a run had, for the draws of another one with the same data and seed. run: its folder."""

    def __init__(self, run: str | Path) -> None:
        self._folder = Path(run) / FOLDER
        if not self._folder.is_dir():
            raise UserError(f"rollout.replay: {run} has no folder `{FOLDER}`: the run wasn't made with observe.episodes=true")
        self._step, self._groups = -1, dict[tuple[int, int], tuple[str, list[Trajectory]]]()

    async def groups(self, draws: Iterable[Draw]) -> AsyncGenerator[Group]:
        """In drawn order. Raises UserError where the run had no such group, or one of another prompt."""
        for draw in draws:
            self._read(draw.id[0])
            prompt, trajectories = self._groups.get(draw.id, (None, []))
            if prompt != draw.prompt.id or len(trajectories) != len(draw.params):
                what = "no such group" if prompt is None else f"{len(trajectories)} episodes of {prompt}"
                raise UserError(
                    f"rollout.replay: draw {draw.id[1]} of step {draw.id[0] + 1} is {len(draw.params)} episodes of {draw.prompt.id}, and "
                    f"{self._folder} has {what}: give the run's own data, seed and sizes"
                )
            yield Group(draw.id, draw.prompt, trajectories)

    def _read(self, step: int) -> None:
        if step == self._step:
            return
        path = _file(self._folder, step + 1)
        if not path.is_file():
            raise UserError(f"rollout.replay: {path} isn't there: the run that is replayed had fewer steps")
        self._groups = {group: (prompt, trajectories) for group, prompt, trajectories in wire.unpack(path.read_bytes())}
        self._step = step


def _file(folder: Path, step: int) -> Path:
    return folder / f"step_{step}.bin"


__all__ = ["EpisodeSink", "Replayed"]
