"""vLLM's side, generation alone, in process and compiled: python vllm_generate.py MODEL TARGET REPEATS bf16|f32"""

from __future__ import annotations

import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else the memory is another process's
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from work import LENGTHS, PROMPTS, SAMPLES, TOKENS, question, versions, write


def main() -> None:
    path, target, repeats, setting = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    start = time.monotonic()
    model = LLM(
        model=path,
        dtype={"bf16": "bfloat16", "f32": "float32"}[setting],
        max_model_len=512,
        max_num_seqs=PROMPTS * SAMPLES,
        disable_log_stats=True,
        enable_prefix_caching=False,  # else every repeat but the first finds its prompts done
    )
    starting = time.monotonic() - start
    tokenizer = AutoTokenizer.from_pretrained(path)

    def prompt(number: int) -> dict[str, list[int]]:
        turns = [{"role": "user", "content": question(number)}]
        return {"prompt_token_ids": tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)}

    def run(lengths: list[int], samples: int) -> float:
        prompts = [prompt(i) for i in range(len(lengths))]
        wanted = [
            SamplingParams(n=samples, max_tokens=length, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
            for length in lengths
        ]
        start = time.monotonic()
        found = model.generate(prompts, wanted, use_tqdm=False)
        seconds = time.monotonic() - start
        assert [[len(out.token_ids) for out in one.outputs] for one in found] == [[length] * samples for length in lengths]
        return seconds

    equal = [run([TOKENS] * PROMPTS, SAMPLES) for _ in range(repeats)]
    tailed = [run(list(LENGTHS), 1) for _ in range(repeats)]
    write(
        target,
        side="vLLM",
        setting=setting,
        equal_seconds=equal,
        tailed_seconds=tailed,
        starting_seconds=starting,
        versions=versions("vllm-cpu", "torch", "transformers"),
    )


if __name__ == "__main__":
    main()
