"""burnish's side, generation alone: python burnish_generate.py MODEL TARGET REPEATS f32|bf16"""

from __future__ import annotations

import asyncio
import sys
import time

from burnish.models.model import Model
from burnish.rollout.engine import wait_for
from burnish.rollout.native.engine import NativeEngine
from burnish.train.compiles import keep_compiled
from burnish.types import Request, SamplingParams
from work import LENGTHS, PROMPTS, SAMPLES, TOKENS, question, versions, write


def main() -> None:
    path, target, repeats, setting = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    keep_compiled()
    start = time.monotonic()
    model = Model.load(path)
    engine = NativeEngine(
        model.config,
        model.params,
        decode_text=model.codec.tokenizer.decode,
        context=512,
        slots=PROMPTS * SAMPLES,
        prefill_rows=PROMPTS,
        precision="bf16" if setting == "bf16" else "f32",
    )
    starting = time.monotonic() - start
    prompts = [tuple(model.codec.template.start([{"role": "user", "content": question(i)}]).ids) for i in range(len(LENGTHS))]

    async def ask(requests: list[Request]) -> float:
        start = time.monotonic()
        found = await asyncio.gather(*(engine.generate(request) for request in requests))
        seconds = time.monotonic() - start
        assert [len(one.ids) for one in found] == [request.params.max_tokens for request in requests]
        return seconds

    def run(lengths: list[int], samples: int, repeat: int) -> float:
        requests = [
            Request(prompts[i], SamplingParams(max_tokens=length), seed_path=(repeat, i, sample))
            for i, length in enumerate(lengths)
            for sample in range(samples)
        ]
        return wait_for(ask(requests))

    equal = [run([TOKENS] * PROMPTS, SAMPLES, repeat) for repeat in range(repeats)]
    tailed = [run(list(LENGTHS), 1, repeat) for repeat in range(repeats)]
    wait_for(engine.close())
    write(
        target,
        side="burnish",
        setting=setting,
        equal_seconds=equal,
        tailed_seconds=tailed,
        starting_seconds=starting,
        versions=versions("burnish", "jax"),
    )


if __name__ == "__main__":
    main()
