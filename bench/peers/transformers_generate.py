"""transformers' side, generation alone: python transformers_generate.py MODEL TARGET REPEATS bf16|f32

`generate` knows batches only: 32 rows run until the longest of them has its tokens.
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from work import LENGTHS, PROMPTS, SAMPLES, TOKENS, question, versions, write


def main() -> None:
    path, target, repeats, setting = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype={"bf16": torch.bfloat16, "f32": torch.float32}[setting])
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")

    def run(lengths: list[int], questions: list[int]) -> float:
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": question(i)}], tokenize=False, add_generation_prompt=True)
            for i in questions
        ]
        rows = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        most = max(lengths)
        start = time.monotonic()
        with torch.inference_mode():
            found = model.generate(**rows, do_sample=True, temperature=1.0, top_k=0, min_new_tokens=most, max_new_tokens=most)
        seconds = time.monotonic() - start
        assert found.shape[1] == rows["input_ids"].shape[1] + most
        return seconds

    equal_rows = [i for i in range(PROMPTS) for _ in range(SAMPLES)]
    equal = [run([TOKENS] * len(equal_rows), equal_rows) for _ in range(repeats)]
    size = PROMPTS * SAMPLES
    batches = [list(range(i, i + size)) for i in range(0, len(LENGTHS), size)]
    tailed = [sum(run([LENGTHS[i] for i in batch], batch) for batch in batches) for _ in range(repeats)]
    write(
        target,
        side="transformers",
        setting=setting,
        equal_seconds=equal,
        tailed_seconds=tailed,
        versions=versions("transformers", "torch"),
    )


if __name__ == "__main__":
    main()
