"""Messages → ids, by the chat template of a Hugging Face folder; and the ids that end a turn.

Owns rendering (jinja2 in a sandbox, the environment that templates on the hub are written for) and the rule that text of messages stays
text: only the template's own special tokens become special ids. Called by data filters, agents and `burnish chat`.
"""

from __future__ import annotations

import datetime
import difflib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from burnish.config.errors import UserError
from burnish.text.tokenizer import Tokenizer, configured_ids, read_json
from burnish.types import Message

ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation up to where the model speaks: its text, foreign special tokens hidden, and its ids (or those that were added)."""

    text: str
    ids: list[int]


class ChatTemplate:
    """A rendered conversation as text and as ids. `stop_ids`: every id after which the model's turn is over, never empty."""

    def __init__(
        self,
        sources: Mapping[str, str],
        tokenizer: Tokenizer,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        """`sources`: template by name: `default`, and `tool_use` if there is one for conversations with tools."""
        environment = _environment()
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
            parsed = [environment.parse(source) for source in sources.values()]
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template isn't valid jinja2, line {error.lineno}: {error.message}") from error
        # Names that are read, not jinja2's undeclared ones: templates set their own default where an option isn't defined.
        _check_kwargs(self._kwargs, {name.name for tree in parsed for name in tree.find_all(jinja2.nodes.Name) if name.ctx == "load"})
        self._takes_tool_role = True
        ends = (*eos_ids, tokenizer.eos_id, self._end_of_turn())
        self.stop_ids = tuple(dict.fromkeys(index for index in ends if index is not None))
        if not self.stop_ids:
            raise UserError("no id ends a turn: the template closes a turn with none; set eos_token_id in generation_config.json")
        self._special_ids = {tokenizer.token_id(token) for token in tokenizer.special_tokens}
        self.takes_tools = any(name.name == "tools" for tree in parsed for name in tree.find_all(jinja2.nodes.Name))
        """Whether the template writes `tools` itself; where it doesn't, whoever has tools must describe them in words."""
        self._takes_tool_role = self._shows_tool_results()

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Tokenizer, *, template_kwargs: Mapping[str, Any] | None = None) -> ChatTemplate:
        """The template of chat_template.jinja, else of tokenizer_config.json (one, or a list of named ones).

        `template_kwargs` are variables for the template (`enable_thinking`, …); one that it doesn't read is an error.
        """
        folder = Path(folder)
        eos_ids = configured_ids(folder, "eos_token_id", tokenizer.embedding_size)
        return cls(_sources(folder), tokenizer, template_kwargs=template_kwargs, eos_ids=eos_ids)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model reads it, special tokens in their text form. `tools` are JSON schemas."""
        return self._render([dict(message) for message in messages], tools, add_generation_prompt)

    def encode(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of the conversation.

        As `transformers` has them, where no text of messages and tools holds a special token's text; where one does, it stays text:
        it goes through the template as a private character, and comes back after the template's own special tokens were parsed.
        """
        return self._ids(*self._hidden(messages, tools, add_generation_prompt), whole=True)

    def start(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None) -> Rendering:
        """The conversation up to the model's turn, to go on from with `follow`."""
        text, hidden = self._hidden(messages, tools, True)
        return Rendering(text, self._ids(text, hidden, whole=True))

    def follow(
        self,
        begun: Rendering,
        reply: str,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        ended: bool,
    ) -> Rendering | None:
        """What the template writes after the model said `reply`, up to its next turn; the ids are those of what follows the reply only.

        messages: the whole conversation, the reply and what was answered included. ended: the model closed its turn itself, so the
        template's closing token (and white space before it) is left out. None where the template doesn't begin with what `begun` and
        the reply say: it writes earlier turns in another way, and the ids that exist can't be gone on from.
        """
        text, hidden = self._hidden(messages, tools, True, reply)
        kept = begun.text + _replace(reply, hidden)
        if not text.startswith(kept):
            return None
        ids = self._ids(text[len(kept) :], hidden)
        first = next((n for n, index in enumerate(ids) if index in self._special_ids), None)
        closes = ended and first is not None and ids[first] in self.stop_ids
        return Rendering(text, ids[first + 1 :] if closes and first is not None else ids)

    def encode_with_mask(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        """The ids of a whole conversation, and which of them the assistant wrote: its texts, each with the id that ends its turn.

        Read off renderings of growing parts of the conversation, so no template needs `{% generation %}` tags. Raises `UserError` where the
        template changes earlier turns when a later one is added, and where nothing at all would be trained.
        """
        ids = self.encode(messages, tools=tools, add_generation_prompt=False)
        mask = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opened = self.encode(messages[:turn], tools=tools)
            closed = self.encode(messages[: turn + 1], tools=tools, add_generation_prompt=False)
            if ids[: len(closed)] != closed or closed[: len(opened)] != opened:
                raise UserError(
                    f"the chat template rewrites earlier turns, so what the assistant wrote in message {turn} can't be told apart"
                )
            last = next((i for i in range(len(closed) - 1, len(opened) - 1, -1) if closed[i] in self.stop_ids), len(closed) - 1)
            mask[len(opened) : last + 1] = [True] * (last + 1 - len(opened))
        if not any(mask):
            raise UserError("the assistant wrote nothing in this conversation, so nothing of it could be trained: leave the row out")
        return ids, mask

    def _render(self, messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        if not messages:
            raise UserError("a conversation needs at least one message")
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if not self._takes_tool_role:
            messages = _as_user_messages(messages)
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {**self._tokenizer.named_tokens, **self._kwargs}
        try:
            return self._templates[name].render(
                messages=present, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **variables
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(str(message.get("role")) for message in present)
            raise UserError(f"the chat template refused messages of the roles {roles}: {error}") from error

    def _hidden(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool, *more: str) -> tuple[str, dict[str, str]]:
        """The rendering with special tokens of messages and tools (and of the texts in `more`) as the private characters that stand for
        them."""
        hidden = self._hidden_characters(list(_texts([messages, tools, list(more)])))
        shown = [dict(message) for message in messages]
        if hidden:
            shown, tools = _replace(shown, hidden), _replace(tools, hidden)
        return self._render(shown, tools, add_generation_prompt), hidden

    def _ids(self, text: str, hidden: Mapping[str, str], *, whole: bool = False) -> list[int]:
        """The ids of a rendering, or of its end, with what was hidden as text. whole: refuse what can't be encoded piece by piece."""
        ids = self._tokenizer.encode(text, parse_special=True)
        if not hidden:
            return ids
        pieces = list(self._tokenizer.split_special(text))
        if whole and self._encode_pieces(pieces, {}) != ids:
            raise UserError(f"a message holds {' and '.join(hidden)}, which this tokenizer can't encode as text between its special tokens")
        return self._encode_pieces(pieces, {character: special for special, character in hidden.items()})

    def _hidden_characters(self, texts: list[str]) -> dict[str, str]:
        """Special tokens that occur in `texts` → a private character each that doesn't; the same one for as long as no text has any."""
        found = {token for token in self._tokenizer.special_tokens if any(token in text for text in texts)}
        used = {character for text in texts for character in text} if found else set()
        free = (character for character in map(chr, PRIVATE_USE) if character not in used)
        return {token: character for token, character in zip(self._tokenizer.special_tokens, free, strict=False) if token in found}

    def _shows_tool_results(self) -> bool:
        """Whether the template has words for a message of the role `tool`."""
        result = chr(PRIVATE_USE[0])
        asked: list[dict[str, Any]] = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}]
        try:
            return result in self._render([*asked, {"role": "tool", "content": result}], None, False)
        except ValueError:
            return False

    def _encode_pieces(self, pieces: list[int | str], restore: Mapping[str, str]) -> list[int]:
        table = str.maketrans(dict(restore))
        parts = ([piece] if isinstance(piece, int) else self._tokenizer.encode(piece.translate(table)) for piece in pieces)
        return list(itertools.chain.from_iterable(parts))

    def _end_of_turn(self) -> int | None:
        """The special token that the template writes after an assistant's text."""
        reply = chr(PRIVATE_USE[0])
        try:
            rendered = self._render([{"role": "user", "content": "hello"}, {"role": "assistant", "content": reply}], None, False)
        except ValueError:  # a template that wants more than a question and an answer; then generation_config.json alone decides
            return None
        return next((piece for piece in self._tokenizer.split_special(rendered.rpartition(reply)[2]) if isinstance(piece, int)), None)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote, for tools that want to know; here it renders its body."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(list(parser.parse_statements(("name:endgeneration",), drop_needle=True)), lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Unlike jinja2's own filter: no HTML escapes, and non-ASCII text as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _check_kwargs(kwargs: Mapping[str, Any], variables: set[str]) -> None:
    for name in kwargs:
        if name in ARGUMENTS or name not in variables:
            nearest = difflib.get_close_matches(name, variables - ARGUMENTS, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise UserError(f"chat_template_kwargs has {name!r}, which isn't an option of this chat template{hint}")


def _sources(folder: Path) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    entry = read_json(folder / "tokenizer_config.json").get("chat_template")
    sources: dict[str, Any] = {named["name"]: named["template"] for named in entry} if isinstance(entry, list) else {"default": entry}
    if not isinstance(sources.get("default"), str):
        raise UserError(
            f"{folder} has no chat template: chat_template.jinja or `chat_template` in tokenizer_config.json; is it a base model?"
        )
    return sources


def _as_user_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results as a user's message, those that follow each other as one: for templates that know no role `tool`."""
    shown: list[dict[str, Any]] = []
    for is_result, run in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            results = (f"```tool_output\n{message['content']}\n```" for message in run)
            shown.append({"role": "user", "content": "\n".join(results)})
        else:
            shown.extend(run)
    return shown


def _texts(value: Any) -> Iterator[str]:
    """Every string in nested mappings and sequences."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_texts, (*value.keys(), *value.values())))
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(_texts, value))


def _replace(value: Any, replacements: Mapping[str, str]) -> Any:
    """A copy of nested mappings and sequences with the replacements made in every string, keys too."""
    if isinstance(value, str):
        for old, new in replacements.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, Mapping):
        return {_replace(key, replacements): _replace(item, replacements) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(item, replacements) for item in value]
    return value
