"""Secrets are used and never shown: not by `config show`, not in errors, not in what a run keeps. (R54)

The recommended way is the environment, `BURNISH__REWARDS__0__OPTIONS__API_KEY`; every other way is kept silent too.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from burnish.cli import main
from burnish.config import secrets
from burnish.config.errors import ConfigError, UserError
from burnish.config.loader import dump_config, load_config
from burnish.config.mistakes import outline
from burnish.config.schema import Config
from burnish.observe.run_folder import RunFolder, read_status

CANARY = "sk-canary-7f3a"


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_seen", set())


@pytest.mark.parametrize(
    "key",
    "api_key API_KEY apiKey openai_api_key token hf_token X-Auth-Token password db.password client_secret secrets Authorization "
    "credentials private_key secret-key passwd".split(),
)
def test_keys_of_secrets_are_known_by_whole_words(key: str):
    assert secrets.hides(f"rewards.0.options.{key}")


@pytest.mark.parametrize(
    "key", "max_tokens tokens_per_device tokenizer pad_token eos_token token_mean prompt_key key keyboard monkey secretary".split()
)
def test_other_keys_are_not(key: str):
    assert not secrets.is_secret(key)


def test_no_key_of_burnish_is_taken_for_a_secret():
    assert [path for path in outline(Config, {}) if secrets.hides(path)] == []


IN_A_FILE = f"""
rewards:
  - fn: exact
    options:
      api_key: {CANARY}-1
      retries: 3
      headers: {{Authorization: "Bearer {CANARY}-2", accept: json}}
      secrets: [{CANARY}-3, {{deep: {CANARY}-4}}]
      max_tokens: 17
environment: {{options: {{password: 12345678}}}}
"""
GIVEN = {
    "file": (IN_A_FILE, [], {}),
    "environment": ("rewards: [{fn: exact}]", [], {"BURNISH__REWARDS__0__OPTIONS__API_KEY": CANARY}),
    "command line": ("rewards: [{fn: exact}]", [f"rewards.0.options.api_key={CANARY}"], {}),
    "inside a section on the command line": ("", [f"rewards=[{{fn: exact, options: {{api_key: {CANARY}}}}}]"], {}),
    "inside a section in the environment": ("", [], {"BURNISH__REWARDS": f"[{{fn: exact, options: {{api_key: {CANARY}}}}}]"}),
    "copied": ("rewards: [{fn: exact, options: {token: '${environment.options.token}'}}]", [f"environment.options.token={CANARY}"], {}),
}


@pytest.mark.parametrize("text, overrides, environ", GIVEN.values(), ids=GIVEN.keys())
def test_r54_the_run_gets_a_secret_and_its_configuration_keeps_none(
    tmp_path: Path, text: str, overrides: list[str], environ: dict[str, str]
):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    resolved = load_config(file, overrides, environ)
    assert CANARY in repr(resolved.config.rewards[0].options)
    kept = dump_config(resolved)
    assert CANARY not in kept and "12345678" not in kept and '"***"' in kept
    if text is IN_A_FILE:
        assert "max_tokens: 17" in kept and "retries: 3" in kept and "accept: json" in kept


def test_a_kept_configuration_asks_for_its_secrets_again(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(load_config(None, [f"rewards=[{{fn: exact, options: {{api_key: {CANARY}}}}}]"], {})))
    with pytest.raises(
        ConfigError, match=r"rewards.0.options.api_key: is a secret that was written as \*\*\*: give it again.*config.yaml:"
    ):
        load_config(file, [], {})
    again = load_config(file, [], {"BURNISH__REWARDS__0__OPTIONS__API_KEY": CANARY})
    assert again.config.rewards[0].options == {"api_key": CANARY}


@pytest.mark.parametrize("secret", ["*abc", "!x y", "1e5", "a${b}c", "{not: yaml", '"'])
def test_a_secret_in_the_environment_is_a_text_as_it_stands(secret: str):
    resolved = load_config(None, [], {"BURNISH__ENVIRONMENT__OPTIONS__PASSWORD": secret})
    assert resolved.config.environment.options == {"password": secret}


MISTAKES = {
    "an unknown key": (f"data: {{password: {CANARY}}}", []),
    "a wrong type": (f"cluster: {{actor: {{axes: {{token: {CANARY}}}}}}}", []),
    "another mistake beside it": (f"data: {{chat_template_kwargs: {{token: {CANARY}}}, shuffle: 3}}", []),
    "a tag": (f"data: {{chat_template_kwargs: {{token: !{CANARY} x}}}}", []),
    "an alias": (f"data: {{chat_template_kwargs: {{token: *{CANARY}}}}}", []),
    "an override that is no YAML": ("", [f"data={{token: {CANARY}"]),
    "set twice": ("", [f"environment.options.password={CANARY}"]),
    "copied to where it would be shown": (
        f"environment: {{options: {{password: {CANARY}}}}}\ndata: {{system_prompt: 'x ${{environment.options.password}}'}}",
        [],
    ),
}


@pytest.mark.parametrize("text, overrides", MISTAKES.values(), ids=MISTAKES.keys())
def test_r54_errors_say_where_and_never_what(
    tmp_path: Path, text: str, overrides: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    if overrides and "password" in overrides[0]:
        monkeypatch.setenv("BURNISH__ENVIRONMENT__OPTIONS__PASSWORD", f"{CANARY}-other")
    for debug in ([], ["--debug"]):
        assert main.main(["config", "show", str(file), *overrides, *debug]) == 2
        said = "".join(capsys.readouterr())
        assert CANARY not in said and ("run.yaml:1" in said or "run.yaml:2" in said or "command line" in said)


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """The exit code of a command that reads a secret and ends with `error`."""

    def run(args: object) -> int:
        load_config(None, [], {"BURNISH__ENVIRONMENT__OPTIONS__API_KEY": CANARY})
        raise error

    monkeypatch.setattr(main, "COMMANDS", {"fail": SimpleNamespace(add_parser=lambda sub: sub.add_parser("fail"), run=run)})
    return main.main(["fail"])


@pytest.mark.parametrize("error", [ConnectionError(f"401 for key {CANARY}"), UserError(f"401 for {CANARY}"), ValueError({"key": CANARY})])
def test_r54_the_traceback_of_a_plug_in_has_no_secret(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    error.__cause__ = RuntimeError(f"url?key={CANARY}")
    code = failing(monkeypatch, error)
    said = capsys.readouterr().err
    assert code == (2 if isinstance(error, UserError) else 1)
    assert CANARY not in said and "***" in said


def files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.read_text()


def test_r54_a_runs_folder_has_no_secret(tmp_path: Path):
    resolved = load_config(None, [], {"BURNISH__ENVIRONMENT__OPTIONS__API_KEY": CANARY} | dict(os.environ))
    with pytest.raises(ConnectionError), RunFolder(tmp_path, "run") as folder:
        folder.write_config(dump_config(resolved))
        raise ConnectionError(f"401 for {CANARY}")
    assert read_status(tmp_path / "run")["cause"] == "ConnectionError: 401 for ***"
    assert not any(CANARY in text for text in files(tmp_path))
