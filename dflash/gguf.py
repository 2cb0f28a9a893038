"""GGUF files (version 3) of Llama models -> a Hugging Face model folder, with numpy and `tokenizers` alone.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Block layouts: `ggml-common.h` of the same
repository. llama.cpp's converter reorders the rows of q and k so that rotary pairs are neighbours; Hugging
Face keeps the two halves of a head apart, so that order is undone here.

Supported is what the packaged models use: tensors of type F32, Q8_0 and Q4_1, architecture `llama`, a
byte-level BPE tokenizer of the `smollm` kind. Anything else raises GGUFError, which says what was met.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL_TOKEN = 3

_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUFError(ValueError):
    """A GGUF file that is damaged, or of a kind that is not supported here."""


@dataclass
class Tensor:
    """One stored tensor; `shape` in row-major order (the file's reversed), `read` decodes to float32."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class _Cursor:
    def __init__(self, data: memoryview) -> None:
        self.view, self.at = data, 0

    def take(self, fmt: str, count: int = 1) -> Any:
        values = struct.unpack_from(f"<{count}{fmt}", self.view, self.at)
        self.at += struct.calcsize(f"<{count}{fmt}")
        return values[0] if count == 1 else list(values)

    def string(self) -> str:
        length = self.take("Q")
        self.at += length
        return bytes(self.view[self.at - length : self.at]).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, length = self.take("I"), self.take("Q")
            return [self.value(item) for _ in range(length)]
        return self.take(_SCALARS[kind])


def read(path: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and the tensors of a GGUF file; tensors are decoded only when asked. Raises GGUFError."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    cursor = _Cursor(data.data)
    try:
        if bytes(data[:4]) != b"GGUF":
            raise GGUFError(f"{path} does not begin with the letters GGUF")
        cursor.at = 4
        if (version := cursor.take("I")) != 3:
            raise GGUFError(f"{path} is GGUF version {version}; version 3 is supported")
        tensor_count, pair_count = cursor.take("Q"), cursor.take("Q")
        meta = {}
        for _ in range(pair_count):
            key = cursor.string()
            meta[key] = cursor.value(cursor.take("I"))
        entries = []
        for _ in range(tensor_count):
            name, dims = cursor.string(), [cursor.take("Q") for _ in range(cursor.take("I"))]
            entries.append((name, tuple(reversed(dims)), cursor.take("I"), cursor.take("Q")))
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise GGUFError(f"{path} is damaged near byte {cursor.at} ({error!r})") from None
    align = meta.get("general.alignment", 32)
    base = -(-cursor.at // align) * align
    tensors = {name: _tensor(path, data, name, shape, kind, base + at) for name, shape, kind, at in entries}
    return meta, tensors


def _tensor(path: Path | str, data: np.ndarray, name: str, shape: tuple[int, ...], kind: int, at: int) -> Tensor:
    if kind not in _DECODERS:
        raise GGUFError(f"{path}: tensor {name} has type {kind}; supported are {sorted(_DECODERS)} (F32, Q4_1, Q8_0)")
    per_block, block_bytes, decode = _DECODERS[kind]
    elements = int(np.prod(shape))
    size = elements // per_block * block_bytes
    if elements % per_block or at + size > len(data):
        raise GGUFError(f"{path} ends before tensor {name} does")
    return Tensor(shape, lambda: decode(data[at : at + size].reshape(-1, block_bytes)).reshape(shape))


def _f32(blocks: np.ndarray) -> np.ndarray:
    return np.frombuffer(blocks.tobytes(), dtype="<f4")


def _half(blocks: np.ndarray, first: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2").astype(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """34 bytes for 32 weights: scale (half), then 32 signed bytes."""
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """20 bytes for 32 weights: scale, minimum (halves), then 16 bytes; low nibbles come first."""
    nibbles = np.concatenate([blocks[:, 4:] & 0x0F, blocks[:, 4:] >> 4], axis=1)
    return _half(blocks, 0) * nibbles.astype(np.float32) + _half(blocks, 2)


# ggml type -> weights a block, bytes a block, decoder of uint8 [blocks, bytes] to float32
_DECODERS: dict[int, tuple[int, int, Callable[[np.ndarray], np.ndarray]]] = {
    0: (1, 4, _f32),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}


def unpack(gguf: Path, folder: Path) -> None:
    """Write weights (bfloat16), configuration and tokenizer of a Llama GGUF into the existing `folder`.

    Raises GGUFError for what is not supported.
    """
    meta, tensors = read(gguf)
    if (architecture := meta.get("general.architecture")) != "llama":
        raise GGUFError(f"{gguf} holds a model of architecture {architecture}; supported is llama")
    try:
        config, generation = _config(meta, tied="output.weight" not in tensors)
        _write_tokenizer(meta, folder, config["max_position_embeddings"])
    except KeyError as error:
        raise GGUFError(f"{gguf} lacks the metadata {error}") from None
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _write_bfloat16(folder / "model.safetensors", dict(_llama_names(meta, tensors)))


def _llama_names(meta: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if len(parts) == 2 and parts[0] in _LLAMA_OUTER:
            yield f"{_LLAMA_OUTER[parts[0]]}.weight", tensor
        elif len(parts) == 4 and parts[0] == "blk" and parts[2] in _LLAMA_LAYER:
            if parts[2] in heads:
                tensor = _split_halves(tensor, heads[parts[2]])
            yield f"model.layers.{parts[1]}.{_LLAMA_LAYER[parts[2]]}.weight", tensor
        else:
            raise GGUFError(f"tensor {name} has no place in a Llama model")


def _split_halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs (0, half), (1, half + 1), ... to the first half, then the second."""

    def reordered() -> np.ndarray:
        weight = tensor.read()
        rows, columns = weight.shape
        return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)

    return Tensor(tensor.shape, reordered)


def _config(meta: dict[str, Any], tied: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    token = {name: meta[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")}
    ids = {
        "bos_token_id": token["bos"],
        "eos_token_id": token["eos"],
        "pad_token_id": token["padding"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **ids,
    }
    return config, ids


def _write_tokenizer(meta: dict[str, Any], folder: Path, longest: int) -> None:
    """The SmolLM tokenizer: digits apart, then GPT-2's byte-level BPE; no token is added unasked."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise GGUFError(f"the tokenizer is of kind {kind}; supported is ('gpt2', 'smollm')")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": longest,
            "chat_template": meta["tokenizer.chat_template"],
            **{f"{role}_token": tokens[meta[f"tokenizer.ggml.{name}_token_id"]] for role, name in named.items()},
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_bfloat16(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file, one tensor in memory at a time.

    Written by hand because numpy has no bfloat16 and the library's torch-free entry changed between releases.
    Format: https://github.com/huggingface/safetensors#format.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * int(np.prod(tensor.shape))
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(bfloat16(tensor.read()).astype("<u2").tobytes())


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits (uint16) of finite float32 `values` rounded to bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
