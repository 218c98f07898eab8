"""Write a tiny language model: a 475 KB GGUF file of random weights that a real engine serves, in under a second.

Its answers are noise, but they come through a real tokenizer, real attention and a real KV memory. The vocabulary is
one token a byte and ten words, so that answers hold broken UTF-8 as well.
`python -m tests.engine.tiny_model FILE [LAYERS]`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

WIDTH = 64
LAYERS = 2
HEADS = 4
FEED_FORWARD = 128
CONTEXT = 4096

WORDS = ("the", "sea", "of", "and", "a", "to", "in", "is", "ship", "wave")
SPECIAL = ("<unk>", "<s>", "</s>")

#: One token, so that a test can make the model begin a call (`logit_bias`): by chance it never would.
TOOL_CALL = "<tool_call>\n"

#: GGUF's numbers for the kinds of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

#: In the form of Hermes where tools are given: llama.cpp learns from it how calls are written.
CHAT_TEMPLATE = """\
{%- if tools %}system: tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}{{ m['role'] }}: {{ m['content'] }}
{%- for call in (m['tool_calls'] if m['tool_calls'] is defined and m['tool_calls'] else []) %}
<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>
{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""

#: Small enough for logits that are close together, so that answers vary.
SPREAD = 0.08
SEED = 7


def write_tiny_model(path: Path, *, layers: int = LAYERS) -> None:
    """Write the model to `path`; the same bytes every time. More `layers` make it slower."""
    writer = gguf.GGUFWriter(path, "llama")
    vocabulary = _write_vocabulary(writer)
    _write_shape(writer, vocabulary, layers)
    _write_weights(writer, vocabulary, layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer: Any) -> int:
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(f"\u2581{word}" for word in WORDS), TOOL_CALL]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS), USER_DEFINED]
    first_word = len(tokens) - len(WORDS) - 1
    scores = [0.0 if number < first_word else -float(number) for number in range(len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    return len(tokens)


def _write_shape(writer: Any, vocabulary: int, layers: int) -> None:
    writer.add_name("tiny-random")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(vocabulary)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)


def _write_weights(writer: Any, vocabulary: int, layers: int) -> None:
    noise = np.random.default_rng(SEED)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", (noise.standard_normal(shape) * SPREAD).astype(np.float32))

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))

    add("token_embd", vocabulary, WIDTH)
    add("output", vocabulary, WIDTH)
    add_norm("output_norm")
    for layer in range(layers):
        for name in ("attn_norm", "ffn_norm"):
            add_norm(f"blk.{layer}.{name}")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", WIDTH, WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}", FEED_FORWARD, WIDTH)
        add(f"blk.{layer}.ffn_down", WIDTH, FEED_FORWARD)


if __name__ == "__main__":
    write_tiny_model(Path(sys.argv[1]), layers=int(sys.argv[2]) if len(sys.argv) > 2 else LAYERS)
