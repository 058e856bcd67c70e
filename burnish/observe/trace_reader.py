"""Reads `trace.pftrace` back: spans with their lanes and ids, and counters. Owns nothing on disk. `burnish trace` and the report
call it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from burnish.config.errors import MissingFile
from burnish.observe.trace_writer import previous_part, whole_packets


@dataclass(slots=True)
class Slice:
    """A span as it was written. end_ns: of one that was cut off, the end of the trace. depth: how many it lies in, on its lane."""

    name: str
    group: str
    lane: str
    track: int
    start_ns: int
    end_ns: int
    depth: int
    ids: dict[str, Any] = field(default_factory=dict)
    flows: tuple[int, ...] = ()
    cut: bool = False

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(slots=True)
class Timeline:
    """A run's trace. slices: by start, parents before what is in them. counters: (time in ns, value) by name."""

    slices: list[Slice]
    counters: dict[str, list[tuple[int, float]]]

    def named(self, *names: str) -> list[Slice]:
        return [one for one in self.slices if one.name in names]


def read(path: Path) -> Timeline:
    """The trace at `path`, with the part before it where there is one. Raises MissingFile."""
    if not path.is_file():
        raise MissingFile(f"no {path}; a run's trace is written while it runs, unless observe.trace_mib is 0")
    parts = [part for part in (previous_part(path), path) if part.is_file()]
    slices: dict[tuple[str, str, str, int], Slice] = {}
    counters: dict[str, list[tuple[int, float]]] = {}
    for part in parts:
        data = part.read_bytes()
        for one in _slices(pb.Trace.FromString(data[: whole_packets(data)]).packet, counters):
            slices[one.group, one.lane, one.name, one.start_ns] = one  # a span that a new file repeats has its end there
    return Timeline(sorted(slices.values(), key=lambda one: (one.start_ns, one.depth)), counters)


def _slices(packets: Any, counters: dict[str, list[tuple[int, float]]]) -> Iterator[Slice]:
    about: dict[int, Any] = {}
    names: dict[tuple[int, int], str] = {}
    keys: dict[tuple[int, int], str] = {}
    stacks: dict[int, list[Slice]] = {}
    latest = 0
    for packet in packets:
        sequence = packet.trusted_packet_sequence_id
        names |= {(sequence, entry.iid): entry.name for entry in packet.interned_data.event_names}
        keys |= {(sequence, entry.iid): entry.name for entry in packet.interned_data.debug_annotation_names}
        if packet.HasField("track_descriptor"):
            about[packet.track_descriptor.uuid] = packet.track_descriptor
        if not packet.HasField("track_event"):
            continue
        event, latest = packet.track_event, max(latest, packet.timestamp)
        track, found = event.track_uuid, {keys[sequence, note.name_iid]: _value(note) for note in event.debug_annotations}
        stack = stacks.setdefault(track, [])
        if event.type == pb.TrackEvent.TYPE_COUNTER:
            counters.setdefault(about[track].name, []).append((packet.timestamp, event.double_counter_value))
        elif event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            lane = about[track]
            group = about[lane.parent_uuid].name
            flows = (*event.flow_ids, *event.terminating_flow_ids)
            begun = Slice(names[sequence, event.name_iid], group, lane.name, track, packet.timestamp, 0, len(stack), found, flows)
            stack.append(begun)
        elif stack:
            ended = stack.pop()
            ended.end_ns, ended.ids = packet.timestamp, ended.ids | found
            yield ended
    for one in (one for stack in stacks.values() for one in stack):
        one.end_ns, one.cut = latest, True
        yield one


def _value(note: Any) -> Any:
    return getattr(note, note.WhichOneof("value"))


def ids_text(ids: Mapping[str, Any]) -> str:
    """Ids in a few words: `step 3, group 1`."""
    return ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in ids.items())


__all__ = ["Slice", "Timeline", "ids_text", "read"]
