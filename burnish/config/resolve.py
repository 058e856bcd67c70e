"""From a name in a configuration to the function or class that it means, and whether the options given to it fit.

Owns the three ways to name something: an attribute of the one module for that kind of thing (`exact`), `my_pkg.mod:fn`, `./file.py:fn`.
There is no registry: what isn't found this way doesn't exist. Called by whoever builds rewards, environments, agents and data sources.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from burnish.config.errors import UserError, suggest


def resolve(
    name: str, *, kind: str, module: ModuleType | Mapping[str, Any] | None = None, base: Path = Path(), attribute: str | None = None
) -> Callable[..., Any]:
    """The callable that `name` means.

    `kind` names the thing in errors ("reward"). `module` holds the bare names: those of its `__all__`, or a mapping's keys. A file is
    sought from `base`, the configuration's folder, then from the working directory. `attribute` is the name to take from a file or module
    that is named without `:fn`. Raises `UserError` when nothing is found, when an import fails, and when what is found can't be called.
    """
    place, colon, wanted = name.rpartition(":")
    if not colon:
        place, wanted = name, attribute or ""
    what = f"{kind} `{name}`"
    if place.endswith(".py") or "/" in place:
        found = _attribute(_load_file(place, base, what), wanted, what, place)
    elif colon or (attribute and "." in place):
        found = _attribute(_import(place, what), wanted, what, place)
    else:
        names = _public(module)
        if name not in names:
            known = f"; known: {', '.join(sorted(names))}" if names else ""
            raise UserError(f"there is no {what}{suggest(name, names) or known} (your own: `my_pkg.mod:name` or `./file.py:name`)")
        found = names[name]
    if not callable(found):
        raise UserError(f"{what} is {found!r} ({type(found).__name__}), expected a function or a class")
    return found


def check_options(
    fn: Callable[..., Any], options: Mapping[str, Any], *, what: str, reserved: Collection[str] = (), complete: bool = False
) -> None:
    """Raises `UserError` for every option that the signature of `fn` doesn't take by keyword.

    `reserved` are the parameters that burnish fills itself. `complete`: the options are all that `fn` will get, so each parameter without a
    default must be among them.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in reserved}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wrong: list[str] = []
    for name in options:
        if name in reserved:
            wrong.append(f"`{name}` is filled by burnish")
        elif name not in named and not anything:
            wrong.append(f"it takes no `{name}`{suggest(name, named) or '; it takes ' + (', '.join(named) or 'none')}")
    if complete:
        wrong += [f"it needs `{name}`" for name, p in named.items() if p.default is p.empty and name not in options]
    if wrong:
        raise UserError(f"options of {what}: {'; '.join(wrong)}")


def _public(module: ModuleType | Mapping[str, Any] | None) -> Mapping[str, Any]:
    if isinstance(module, ModuleType):
        return {name: getattr(module, name) for name in module.__all__}
    return module or {}


def _attribute(module: ModuleType, name: str, what: str, place: str) -> Any:
    names = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    if not name:
        raise UserError(f"{what} doesn't say which name of {place}; write `{place}:name`")
    if name not in names:
        raise UserError(f"{what}: {place} has no `{name}`{suggest(name, names)}")
    return names[name]


def _import(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"{what}: there is no module {error.name}; install it, or run where it can be imported") from error
        raise UserError(f"{what}: importing {name} failed: {type(error).__name__}: {error}") from error


def _load_file(name: str, base: Path, what: str) -> ModuleType:
    """The module in a file, run once: the same file named twice is the same module."""
    candidates = [base / name, Path(name)]
    path = next((path.resolve() for path in candidates if path.is_file()), None)
    if path is None:
        looked = " and ".join(dict.fromkeys(str(candidate.absolute()) for candidate in candidates))
        raise UserError(f"{what}: there is no file {name}; looked for {looked}")
    module_name = f"burnish_file_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{what}: {path} isn't a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise UserError(f"{what}: running {path} failed: {type(error).__name__}: {error}") from error
    return module
