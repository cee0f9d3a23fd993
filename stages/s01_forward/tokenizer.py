"""Read later: text to token ids and back. Hugging Face's tokenizer does the work; the way back is ours."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Message = dict[str, Any]  # {"role": "user", "content": "..."}


class Tokenizer:
    """A model folder's tokenizer. Text is the tokens' *bytes* joined and decoded once, so streaming cannot differ."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer  # seconds to import: only who needs text pays

        if not (Path(folder) / "tokenizer.json").exists():
            raise ValueError(f"{folder} has no tokenizer.json; only tokenizers in that format are supported")
        try:
            self._hf = AutoTokenizer.from_pretrained(
                str(folder), config=plain_config(Path(folder)), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # of any kind, and few of them name a file
            raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error
        self._bytes: dict[int, bytes] = {}  # of each token that was met

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of plain text, by default with the special tokens (BOS, ...) that this tokenizer adds by itself."""
        return list(self._hf(whole(text), add_special_tokens=add_special)["input_ids"])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation. The template writes its special tokens itself: none are added again."""
        from jinja2 import TemplateError  # the library imports it for a template only, and so do we

        if not self.has_chat_template:
            raise ValueError("this model's tokenizer has no chat template; pass plain text or token ids")
        if strange := [turn for turn in messages if not isinstance(turn, Mapping)]:
            wanted = {"role": "user", "content": "..."}
            raise ValueError(f"the chat template takes messages like {wanted}, not {strange[0]!r}")
        try:
            text = self._hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, AttributeError) as error:  # a role it does not know, no content, ...
            raise ValueError(f"the model's chat template does not take {messages!r}: {error}") from None
        return self.encode(str(text), add_special=False)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids, by default without special tokens. Ids beyond the vocabulary (padded models) give
        nothing.
        """
        raw = b"".join(self.token_bytes(token_id, skip_special) for token_id in token_ids)
        text = raw.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._drops_first_space else text

    @property
    def has_chat_template(self) -> bool:
        """Can `encode_chat` be used?"""
        return self._hf.chat_template is not None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokenizer's own EOS, as a set of one or none."""
        return frozenset() if self._hf.eos_token_id is None else frozenset({self._hf.eos_token_id})

    def token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        """The bytes that a token stands for; a character may need several tokens. Special tokens give none."""
        if skip_special and token_id in self.special_ids:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._hf.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""
        if self._byte_level:
            try:
                return bytes(map(unicode_to_byte().__getitem__, token))
            except KeyError:  # an added token, stored as plain text
                return token.encode()
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that stand for no text: EOS, the marks of a conversation, ..."""
        return frozenset(self._hf.all_special_ids) | {
            token_id for token_id, token in self._hf.added_tokens_decoder.items() if token.special
        }

    @cached_property
    def _drops_first_space(self) -> bool:
        """SentencePiece puts a space before a text and takes it away again; an answer goes on from its prompt."""
        return not self._byte_level and self._hf.backend_tokenizer.decoder.decode(["\u2581a"]) == "a"

    @cached_property
    def _byte_level(self) -> bool:
        """GPT-2's way of writing bytes (Qwen, Llama 3, SmolLM), as against SentencePiece's."""
        return "ByteLevel" in json.dumps(json.loads(self._hf.backend_tokenizer.to_str()).get("decoder"))


def plain_config(folder: Path) -> PreTrainedConfig | None:
    """What transformers asks of `config.json` to choose a tokenizer's class; None: the folder does not say enough.

    Left to itself, it makes a config of the model's own class, and Llama's brings 700 modules along: 0.7 s.
    """
    from transformers import PreTrainedConfig

    from stages.s01_forward.config_json import read_json  # torch comes with it, which schedulers do without

    model, tokenizer = folder / "config.json", folder / "tokenizer_config.json"
    if not model.exists() or not tokenizer.exists():
        return None
    named = read_json(tokenizer)
    if not named.get("tokenizer_class") or "auto_map" in named:
        return None
    keys = {key: value for key, value in read_json(model).items() if key in ("model_type", "model_name")}
    return PreTrainedConfig.from_dict({**keys, "name_or_path": str(folder)})


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """A model folder's tokenizer, if it has one: without, a model speaks token ids."""
    return Tokenizer(folder) if (folder / "tokenizer.json").exists() else None


def whole(text: str) -> str:
    """The text itself; half a character (a lone surrogate, as broken decoding leaves it) is refused."""
    if half := re.search("[\ud800-\udfff]", text):
        raise ValueError(f"the text holds {half[0]!r} at index {half.start()}, half a character: it has no tokens")
    return text


@cache
def unicode_to_byte() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
