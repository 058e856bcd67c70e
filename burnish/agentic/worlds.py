"""The environments that a configuration may name without a module: `__all__`. Their packages are imported when they are played."""

from burnish.agentic.environments import TaskEnvironment, ToolEnvironment
from burnish.agentic.gym import GymText, MiniGrid
from burnish.agentic.openenv import OpenEnv
from burnish.agentic.programs import ProgramEnvironment
from burnish.agentic.repository import Repository
from burnish.agentic.textarena import TextArena

__all__ = ["GymText", "MiniGrid", "OpenEnv", "ProgramEnvironment", "Repository", "TaskEnvironment", "TextArena", "ToolEnvironment"]
