"""Writes the spans of a run as `trace.pftrace`, which opens in ui.perfetto.dev.

Owns the form on disk (the `perfetto` package's protobuf) and the thread that writes beside the run. Packets are appended as they come, so
what is on disk is a trace whenever the run ends, by `kill -9` too: then the spans that were open have no end, which says what the run was
doing. The file is bounded: past half of its limit it becomes `trace.previous.pftrace` and a new one begins, in which open spans begin
again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from burnish.observe import trace
from burnish.observe.sinks import EvalReport, StepReport
from burnish.observe.trace import Lane, span

EVERY_S = 0.25
"""How often what happened is written down, and so how much of it a kill may take; the end of a step is written at once."""
SHOWN = ("reward/mean", "staleness/mean", "perf/rollout_tokens_per_second")
"""Metrics of a step that are drawn in the trace too."""
GROUPS = ("threads", "devices", "queue", "engine slots", "episodes", "tools", "rewards")
"""Headings of the timeline, from the top."""
_CLEARED, _NEEDS = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED, pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE


class TraceWriter:
    """A sink that writes every span of the process, whichever thread makes it, until it is closed.

    most_bytes: of both files together. A file of a run that goes on is appended to; the spans that its end cut off are ended there.
    then: gets all events too, on the writing thread; if it fails, it is named on stderr and left out.
    """

    def __init__(self, path: Path, *, most_bytes: int = 48 * 2**20, then: Callable[[Sequence[trace.Event]], None] | None = None) -> None:
        self._path, self._half, self._then = path, most_bytes // 2, then
        self._failed: OSError | None = None
        self._open_spans: dict[Lane, list[span]] = {}
        self._offset = time.time_ns() - time.monotonic_ns()  # wall time, so that a run that goes on tomorrow lies after today's part
        trace.events()  # what was before the run
        self._file = -1
        self._begin_file()
        self._lock = threading.Lock()
        self._awake, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="trace-writer", daemon=True)
        self._thread.start()

    def step(self, report: StepReport) -> None:
        for name in SHOWN:
            if name in report.metrics:
                trace.count(name, report.metrics[name])
        self._awake.set()

    def evaluation(self, report: EvalReport) -> None:
        """Evaluations are spans already."""

    def close(self) -> None:
        """Write the rest. Raises OSError if the disk has refused something on the way."""
        if self._file < 0:
            return
        self._ended = True
        self._awake.set()
        self._thread.join()
        self.flush()
        os.close(self._file)
        self._file = -1
        if self._failed is not None:
            raise self._failed

    def flush(self) -> None:
        """Write what has happened so far; what is there when this returns outlives a kill."""
        with self._lock:
            found = trace.events()
            if not found:
                return
            self._hand_on(found)
            if self._failed is not None:
                return
            try:
                self._write(self._packets.of(found, self._open_spans))
                if self._size > self._half:
                    os.close(self._file)
                    os.replace(self._path, previous_part(self._path))
                    self._begin_file()
                    self._write(self._packets.again(self._open_spans))
            except OSError as error:
                self._failed = error  # said at the end: a full disk costs the trace, never the run

    # ------------------------------------------------------------------------------------------------------- the writing thread

    def _work(self) -> None:
        while not self._ended:
            self._awake.wait(EVERY_S)
            self._awake.clear()
            self.flush()

    def _hand_on(self, events: Sequence[trace.Event]) -> None:
        try:
            if self._then is not None:
                self._then(events)
        except Exception as error:  # what other people's sinks raise is data
            self._then = None
            print(f"burnish: spans go nowhere else from here on: {type(error).__name__}: {error}", file=sys.stderr)

    def _begin_file(self) -> None:
        cut_off = _mend(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._packets = _Packets(self._offset)
        self._size = os.fstat(self._file).st_size
        if cut_off:
            self._write(cut_off)

    def _write(self, data: bytes) -> None:
        self._size += len(data)
        while data:
            data = data[os.write(self._file, data) :]


def previous_part(path: Path) -> Path:
    """Where the part of a trace lies that came before the file at `path`."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


class _Packets:
    """Makes packets of events; knows which names and lanes its file has heard of."""

    def __init__(self, offset_ns: int) -> None:
        self._offset = offset_ns
        self._sequence = int.from_bytes(os.urandom(4)) | 1  # each process, and each file, numbers its own names
        self._root = int.from_bytes(os.urandom(5)) << 20
        self._tracks: dict[Any, int] = {}
        self._names: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._num_packets = 0

    def of(self, events: Iterable[trace.Event], open_spans: dict[Lane, list[span]]) -> bytes:
        out = pb.Trace()
        for time_ns, kind, what in events:
            if kind == "begin":
                open_spans.setdefault(what.lane, []).append(what)
                self._begin(out, what, time_ns)
            elif kind == "count":
                event = self._event(out, time_ns, pb.TrackEvent.TYPE_COUNTER, self._counter(out, what[0]))
                event.double_counter_value = what[1]
            elif what in (stack := open_spans.get(what.lane, [])):
                self._end(out, what, time_ns, stack)
        return out.SerializeToString()

    def again(self, open_spans: dict[Lane, list[span]]) -> bytes:
        """Spans that are open while a new file begins."""
        out = pb.Trace()
        for one in (one for stack in open_spans.values() for one in stack):
            self._begin(out, one, one.start_ns)
        return out.SerializeToString()

    def _begin(self, out: Any, one: span, time_ns: int) -> None:
        assert one.lane is not None, "it has begun"
        track = self._lane(out, one.lane)
        name = self._interned(out, self._names, one.name, "event_names")
        keys = [self._interned(out, self._keys, key, "debug_annotation_names") for key in one.ids]
        event = self._event(out, time_ns, pb.TrackEvent.TYPE_SLICE_BEGIN, track)
        event.name_iid = name
        event.flow_ids.extend(one.flows)
        event.terminating_flow_ids.extend(one.ends)
        _annotate(event, keys, one.ids.values())

    def _end(self, out: Any, one: span, time_ns: int, stack: list[span]) -> None:
        assert one.lane is not None, "it has begun"
        track = self._lane(out, one.lane)
        while stack and stack.pop() is not one:  # those that nobody stopped end with what they are in
            self._event(out, time_ns, pb.TrackEvent.TYPE_SLICE_END, track)
        found = dict(one.notes or {}) if one.error is None else {**(one.notes or {}), "error": one.error}
        keys = [self._interned(out, self._keys, key, "debug_annotation_names") for key in found]
        event = self._event(out, time_ns, pb.TrackEvent.TYPE_SLICE_END, track)
        _annotate(event, keys, found.values())

    def _event(self, out: Any, time_ns: int, kind: int, track: int) -> Any:
        packet = self._packet(out)
        packet.timestamp = time_ns + self._offset
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet.track_event

    def _packet(self, out: Any) -> Any:
        packet = out.packet.add()
        packet.trusted_packet_sequence_id = self._sequence
        packet.sequence_flags = _NEEDS if self._num_packets else _CLEARED
        self._num_packets += 1
        return packet

    def _interned(self, out: Any, known: dict[str, int], text: str, table: str) -> int:
        """The number that stands for a text; the first time with the text."""
        if text not in known:
            known[text] = len(known) + 1
            packet = self._packet(out)
            entry = getattr(packet.interned_data, table).add()
            entry.iid, entry.name = known[text], text
        return known[text]

    # ---------------------------------------------------------------------------------------------------------------- tracks

    def _lane(self, out: Any, place: Lane) -> int:
        if place in self._tracks:
            return self._tracks[place]
        return self._track(out, place, place.name, parent=self._group(out, place.group))

    def _group(self, out: Any, group: str) -> int:
        if group in self._tracks:
            return self._tracks[group]
        rank = GROUPS.index(group) if group in GROUPS else len(GROUPS)
        return self._track(out, group, group, parent=self._process(out), rank=rank)

    def _counter(self, out: Any, name: str) -> int:
        key = ("count", name)
        if key in self._tracks:
            return self._tracks[key]
        return self._track(out, key, name, parent=self._process(out), counter=True)

    def _process(self, out: Any) -> int:
        if "" not in self._tracks:
            self._tracks[""] = self._root
            about = self._packet(out).track_descriptor
            about.uuid, about.process.pid, about.process.process_name = self._root, os.getpid(), "burnish"
            about.child_ordering = pb.TrackDescriptor.EXPLICIT
        return self._root

    def _track(self, out: Any, key: Any, name: str, *, parent: int, rank: int | None = None, counter: bool = False) -> int:
        uuid = self._tracks[key] = self._root + len(self._tracks) + 1
        about = self._packet(out).track_descriptor
        about.uuid, about.parent_uuid, about.name = uuid, parent, name
        if rank is not None:
            about.sibling_order_rank, about.child_ordering = rank, pb.TrackDescriptor.LEXICOGRAPHIC
        if counter:
            about.counter.SetInParent()
            about.sibling_order_rank = len(GROUPS) + 1
        return uuid


def _annotate(event: Any, keys: Sequence[int], values: Iterable[object]) -> None:
    for key, value in zip(keys, values, strict=True):
        note = event.debug_annotations.add()
        note.name_iid = key
        if isinstance(value, bool):
            note.bool_value = value
        elif isinstance(value, int):
            note.int_value = value
        elif isinstance(value, float):
            note.double_value = value
        else:
            note.string_value = str(value)


# ------------------------------------------------------------------------------------------------------------- what a crash leaves


def whole_packets(data: bytes) -> int:
    """How many leading bytes of a trace are whole packets: a process that is killed may have written a part of its last one."""
    at = 0
    while at < len(data):
        end, length, shift = at + 1, 0, 0  # one byte of tag: a trace is nothing but packets
        while end < len(data):
            byte = data[end]
            length |= (byte & 0x7F) << shift
            shift, end = shift + 7, end + 1
            if byte < 0x80:
                break
        else:
            return at
        if end + length > len(data):
            return at
        at = end + length
    return at


def _mend(path: Path) -> bytes:
    """Cut off a packet that was written in part; returns ends, in packets, for the spans that a crash left open."""
    data = path.read_bytes() if path.is_file() else b""
    whole = whole_packets(data)
    if whole < len(data):
        os.truncate(path, whole)
    open_tracks: dict[int, int] = {}
    sequence, latest = 0, 0
    for packet in pb.Trace.FromString(data[:whole]).packet:
        if not packet.HasField("track_event"):
            continue
        event, latest = packet.track_event, max(latest, packet.timestamp)
        sequence = packet.trusted_packet_sequence_id
        depth = {pb.TrackEvent.TYPE_SLICE_BEGIN: 1, pb.TrackEvent.TYPE_SLICE_END: -1}.get(event.type, 0)
        open_tracks[event.track_uuid] = open_tracks.get(event.track_uuid, 0) + depth
    out = pb.Trace()
    for track in (track for track, depth in open_tracks.items() for _ in range(depth)):
        packet = out.packet.add()
        packet.trusted_packet_sequence_id, packet.timestamp = sequence, latest
        packet.track_event.type, packet.track_event.track_uuid = pb.TrackEvent.TYPE_SLICE_END, track
    return out.SerializeToString()


__all__ = ["TraceWriter", "previous_part", "whole_packets"]
