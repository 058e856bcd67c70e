"""The tiny model of the command line's tests."""

from tests.cli.conftest import model_folder

__all__ = ["model_folder"]
