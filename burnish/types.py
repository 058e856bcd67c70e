"""The host nouns of a run: what a prompt, a request, a completion, an episode and a group are.

Owns names and shapes only. Numpy, no jax: an environment's tests and an environment's process can import this in milliseconds.
Everything that travels between rooms on the host is one of these; what lives on a device is in `rl.batch` and `train.score`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np


class Message(TypedDict):
    """One chat message, as templates and tools expect it."""

    role: str
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote. error: why it can't be run as it was written; then name and arguments are what could be read of it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


class StopReason(enum.StrEnum):
    """Why a completion ended. Truncation is read from here, never guessed from the ids."""

    STOP_ID = "stop_id"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CONTEXT = "context"
    CANCELLED = "cancelled"
    ERROR = "error"


class Status(enum.StrEnum):
    """How an episode ended. Only `ok` and, by the algorithm's choice, `truncated` enter baselines and losses."""

    OK = "ok"
    TRUNCATED = "truncated"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    GRADER_ERROR = "grader_error"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt source.

    `id` names the row for ever (source, index), so that logs of two runs can be compared. `meta` holds the row's other columns, by name;
    reward functions receive them as keyword arguments and environments as `self.task`.
    """

    id: str
    messages: tuple[Message, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one completion. `temperature == 0` is greedy; nothing else means greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logprobs: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and >= 0 (0 is greedy), got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1] (1 keeps everything), got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 keeps everything), got {self.top_k}")
        if not 0.0 <= self.min_p < 1.0:
            raise ValueError(f"min_p must be in [0, 1) (0 keeps everything), got {self.min_p}")

    @property
    def truncates(self) -> bool:
        """Whether the sampled distribution can differ from the full softmax at this temperature."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample.

    `seed_path` is the identity (run seed, step, group, sample, turn) that the noise is a function of; two requests with the same path,
    prompt, params and weights get the same ids, whatever shares their batch.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed_path: tuple[int, ...] = (0,)
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one request.

    ids: int32[T], the stop id included. logps: float32[T], log-probability of each id under the distribution it was sampled from: the
    softmax at the sampling temperature over the whole vocabulary (`support == "full"`) or over the kept ids (`"truncated"`); at
    temperature 0 the full softmax at temperature 1. kept_ids: int32[T, K] padded with -1 when truncated, else None.
    versions: int32[T], the weights version that sampled each id.
    """

    ids: np.ndarray
    logps: np.ndarray
    versions: np.ndarray
    stop: StopReason
    support: Literal["full", "truncated"] = "full"
    kept_ids: np.ndarray | None = None
    error: str | None = None


@dataclass(slots=True)
class Step:
    """One turn of an episode: the ids that the model was shown, what it sampled, what the environment said."""

    prompt_ids: np.ndarray
    completion: Completion
    text: str
    observation: str | list[Message] = ""
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Trajectory:
    """One episode, token in and token out.

    ids: int32[T], prompt, sampled and environment tokens in order. sampled: bool[T], True where the policy sampled the id (only those
    can carry loss). sampler_logps: float32[T] and versions: int32[T] are 0 and -1 where not sampled. kept_ids: int32[T, K] | None.
    prompt_length: how many leading ids are the prompt that all samples of the group share.
    forks: where `ids` begins anew right after the prompt, because the chat template wrote earlier turns in another way when a new one was
    added (`ids[prompt_length:forks[0]]`, `ids[forks[0]:forks[1]]`, … each continue the prompt and don't see each other). None of these
    first ids is sampled.
    rewards: per reward function, None where there is none. reward_weights: per reward function (1 where none is named). reward: their
    weighted sum or None (missing, never 0 instead).
    group, sample: the identity of the group (step, draw index) and the index within it. error, traceback: of what failed, if something
    did. num_lost: how often the episode was given up because nothing came from it.
    """

    steps: list[Step]
    ids: np.ndarray
    sampled: np.ndarray
    sampler_logps: np.ndarray
    versions: np.ndarray
    prompt_length: int
    group: tuple[int, int]
    sample: int
    status: Status = Status.OK
    kept_ids: np.ndarray | None = None
    forks: tuple[int, ...] = ()
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward_weights: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    messages: list[Message] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    traceback: str = ""
    num_lost: int = 0

    @property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())

    @property
    def final_text(self) -> str:
        """The last assistant text: what single-answer reward functions grade."""
        return self.steps[-1].text if self.steps else ""


@dataclass(slots=True)
class Group:
    """The episodes of one drawn prompt. `id` is (step, draw index): never a position in a batch, never a text."""

    id: tuple[int, int]
    prompt: Prompt
    trajectories: list[Trajectory]
