"""The tokenizers inside GGUF files, as `tokenizer.json` and `tokenizer_config.json`.

Owns which kinds are known and what their metadata mean. Called by `gguf.py` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from burnish.config.errors import UserError

_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen's tokenizer cuts a text before merging, as its published tokenizer.json says it."""


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a file: byte-level BPE as SmolLM or Qwen2 cut texts, or pieces of whole characters as Gemma merges them."""
    kind = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    if kind == ("gpt2", "smollm"):
        # SmolLM's splits every digit off before GPT-2's regular expression applies.
        return _byte_level(metadata, [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if kind == ("gpt2", "qwen2"):
        cut = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated")
        return _byte_level(metadata, [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if kind == ("llama", "default") and not metadata.get("tokenizer.ggml.add_space_prefix", True):
        return _pieces(metadata)
    raise UserError(
        f"GGUF tokenizer {kind} isn't supported, only ('gpt2', 'smollm'), ('gpt2', 'qwen2') and Gemma's; "
        "use the model's Hugging Face folder instead"
    )


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer_config.json`. Its class takes tokenizer.json as it stands; a model's own class would change its rules."""
    texts = metadata["tokenizer.ggml.tokens"]
    special = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in special.items()}
    template = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": texts[index] for name, index in ids.items() if index is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        **({} if template is None else {"chat_template": template}),
    }


def _byte_level(metadata: Mapping[str, Any], before: Sequence[pre_tokenizers.PreTokenizer]) -> Tokenizer:
    texts = metadata["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(before))  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return _with_special(tokenizer, metadata)


def _pieces(metadata: Mapping[str, Any]) -> Tokenizer:
    """BPE over characters, with a space as ▁ and bytes for what has no piece. Its merges aren't in the file: a pair may merge where the
    whole is a piece, and the whole's score says how early."""
    texts, scores, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    vocab = {text: index for index, text in enumerate(texts)}
    merges = []
    for text, score, kind in zip(texts, scores, types, strict=True):
        if kind != TokenType.NORMAL:
            continue
        for at in range(1, len(text)):
            left, right = vocab.get(text[:at]), vocab.get(text[at:])
            if left is not None and right is not None:
                merges.append((-score, left, right))
    pairs = [(texts[left], texts[right]) for _, left, right in sorted(merges)]
    unknown = texts[metadata["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = _with_special(tokenizer, metadata)
    if metadata.get("tokenizer.ggml.add_bos_token"):
        index = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{texts[index]} $A", pair=f"{texts[index]} $A {texts[index]} $B", special_tokens=[(texts[index], index)]
        )
    return tokenizer


def _with_special(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> Tokenizer:
    """Control tokens are found in a text as they stand, and so are tokens that users defined, which decoding shows."""
    kinds = list(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text, kind in kinds if kind == TokenType.CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text, kind in kinds if kind == TokenType.USER_DEFINED])
    return tokenizer
