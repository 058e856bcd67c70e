"""An environment of verifiers, as its author writes it: sums, with a tool that adds."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Adds."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumConfig(vf.TaskConfig):
    with_tool: bool = True


class Sum(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())] if config.with_tool else []

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return 1 / (1 + len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> list[Sum]:
        return [Sum(SumData(prompt=f"{i}+{i}", answer=str(2 * i)), self.config.task) for i in range(5)]


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
