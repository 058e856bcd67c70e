"""Traces for tests: what must hold of a file of them, and small runs through the real learner, in good shape and bad."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from burnish import GRPOConfig, GRPOLearner, RLCluster, RolloutConfig, TrainingConfig
from burnish.agentic.agents import Action
from burnish.agentic.environments import BaseTaskEnv, EnvStepResult
from burnish.models.model import Model
from burnish.observe.run_folder import RunFolder
from burnish.observe.sinks import JsonlSink
from burnish.observe.trace_writer import TraceWriter, whole_packets
from burnish.observe.transcripts import TranscriptSink
from burnish.rl.learner import RLLearner

BEGIN, END, COUNTER = pb.TrackEvent.TYPE_SLICE_BEGIN, pb.TrackEvent.TYPE_SLICE_END, pb.TrackEvent.TYPE_COUNTER


def packets(path: Path) -> Any:
    data = path.read_bytes()
    return pb.Trace.FromString(data[: whole_packets(data)]).packet


def faults_of(path: Path, *, cut: bool) -> list[str]:
    """What is wrong with a trace, by its own bytes alone. cut: its process was killed, so the last spans may be open."""
    found: list[str] = []
    about: dict[int, Any] = {}
    depth: Counter[int] = Counter()
    latest: dict[int, int] = {}
    flows: dict[int, set[str]] = {}
    names: dict[tuple[int, int], str] = {}
    for packet in packets(path):
        sequence = packet.trusted_packet_sequence_id
        names |= {(sequence, entry.iid): entry.name for entry in packet.interned_data.event_names}
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            if track.parent_uuid and track.parent_uuid not in about:
                found.append(f"track {track.name} stands under {track.parent_uuid}, which isn't there")
            about[track.uuid] = track
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        if event.track_uuid not in about:
            found.append(f"an event lies on the track {event.track_uuid}, which isn't there")
        if event.type == COUNTER and not about[event.track_uuid].HasField("counter"):
            found.append(f"a count lies on {about[event.track_uuid].name}, which is no counter")
        if packet.timestamp < latest.get(event.track_uuid, 0):
            found.append(f"time runs backwards on {about[event.track_uuid].name}")
        latest[event.track_uuid] = packet.timestamp
        depth[event.track_uuid] += {BEGIN: 1, END: -1}.get(event.type, 0)
        if depth[event.track_uuid] < 0:
            found.append(f"an end without a beginning on {about[event.track_uuid].name}")
        if event.type == BEGIN:
            if (sequence, event.name_iid) not in names:
                found.append(f"a span has the name {event.name_iid}, which isn't there")
            for flow in (*event.flow_ids, *event.terminating_flow_ids):
                flows.setdefault(flow, set()).add(names[sequence, event.name_iid])
    ended = [linked for linked in flows.values() if "update" in linked]
    if not ended or not all({"rollout", "batch", "queued", "update"} <= linked for linked in ended):
        found.append(f"an update isn't linked with its rollout and its place in the queue: {list(flows.values())}")
    if not cut:
        found += [f"{count} spans of {about[uuid].name} never end" for uuid, count in depth.items() if count]
    return found


def spans_in(path: Path, *names: str) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of the spans of these names, whatever track they lie on, out of the bytes."""
    texts: dict[tuple[int, int], str] = {}
    stacks: dict[int, list[tuple[str, int]]] = {}
    for packet in packets(path):
        texts |= {(packet.trusted_packet_sequence_id, e.iid): e.name for e in packet.interned_data.event_names}
        event = packet.track_event
        if event.type == BEGIN and packet.HasField("track_event"):
            stacks.setdefault(event.track_uuid, []).append((texts[packet.trusted_packet_sequence_id, event.name_iid], packet.timestamp))
        elif event.type == END and packet.HasField("track_event"):
            name, start = stacks[event.track_uuid].pop()
            if name in names:
                yield start, packet.timestamp


# -------------------------------------------------------------------------------------------------------------------------- runs

ALPHABET = "0123456789"


class TwoTurns(BaseTaskEnv):
    """Says a digit twice and pays for repeating it; thinks for `seconds`."""

    def __init__(self, task: Mapping[str, Any], *, max_steps: int | None = None, seconds: float = 0.0) -> None:
        super().__init__(task, max_steps=max_steps)
        self.seconds = seconds

    async def _initial_observation(self) -> str:
        return str(self.task["answer"])

    async def _step_impl(self, action: Action) -> EnvStepResult:
        await asyncio.sleep(self.seconds)
        return EnvStepResult("9", float(action.text.count(self.task["answer"])) + 0.1 * len(action.text), self.num_steps == 2)

    async def close(self) -> None:
        return None


class Slowed(RLCluster):
    """Takes longer than it must, at the places that are named."""

    update_s = sync_s = 0.0

    def update_actor(self, *args: Any, **options: Any) -> Any:
        time.sleep(self.update_s)
        return super().update_actor(*args, **options)

    def sync_weights(self) -> None:
        time.sleep(self.sync_s)
        super().sync_weights()


def slow_rows(seconds: float) -> Iterator[dict[str, Any]]:
    for i in range(10_000):
        time.sleep(seconds)
        yield {"prompt": "", "answer": str(i % 10)}


def traced_learner(
    model: Model,
    folder: RunFolder,
    *,
    steps: int = 4,
    staleness: int = 0,
    env_s: float = 0.0,
    update_s: float = 0.0,
    sync_s: float = 0.0,
    row_s: float = 0.0,
    max_concurrency: int | None = None,
    sinks: Any = (),
) -> RLLearner:
    """16 episodes of two turns a step, with a trace, metrics and transcripts in `folder`."""
    cluster = Slowed(
        model,
        precision="f32",
        rollout=RolloutConfig(
            sampling={"max_tokens": 2},
            max_prompt_tokens=24,
            max_episode_tokens=64,
            slots=16,
            prefill_rows=4,
            decode_chunk=2,
            max_staleness=staleness,
        ),
        training=TrainingConfig(max_steps=steps, batch_size=4, head_chunk=64, optimizer={"learning_rate": 1e-3}),
    )
    cluster.update_s, cluster.sync_s = update_s, sync_s
    limits = {} if max_concurrency is None else {"max_concurrency": max_concurrency}
    from burnish.config.schema import EpisodeLimits

    return GRPOLearner(
        cluster,
        GRPOConfig(num_generations=4),
        train_ds=slow_rows(row_s) if row_s else [{"prompt": "", "answer": str(i)} for i in range(10)],
        env_class=TwoTurns,
        env_kwargs={"seconds": env_s},
        limits=EpisodeLimits(**limits),
        sinks=[JsonlSink(folder), TraceWriter(folder.trace_path), TranscriptSink(folder), *sinks],
    )
