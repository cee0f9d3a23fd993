"""Read later: what every stage's `LLM` has in common. A stage's own `llm.py` says how requests are run."""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from stages.s01_forward.config import ModelConfig
from stages.s01_forward.hub import resolve_model
from stages.s01_forward.inputs import Prompt, PromptRequest, RequestBuilder
from stages.s01_forward.loader import load_model
from stages.s01_forward.model import Model
from stages.s01_forward.ops import TORCH_OPS, Ops
from stages.s01_forward.outputs import RequestOutput, TokenEvent
from stages.s01_forward.progress import show_progress
from stages.s01_forward.sampling_params import SamplingParams, check_int
from stages.s01_forward.tokenizer import Message, tokenizer_of

Params = SamplingParams | Sequence[SamplingParams] | None


class BaseLLM(ABC):
    """A model that answers.

    model: a folder, a hub id or "demo". device: "auto" (a CUDA GPU if there is one), "cpu", "cuda" (the GPU that is
    PyTorch's current one), "cuda:1". dtype: "auto" (the checkpoint's own), "bfloat16", "float16", "float32".
    max_model_len: prompt and answer together, in tokens; at most, and by default, what the model was made for.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        progress: bool = False,
    ) -> None:
        self.device = pick_device(device)
        self.folder = resolve_model(model, progress=progress)
        self.config = ModelConfig.from_dir(self.folder)
        if max_model_len is not None:
            check_int("max_model_len", max_model_len, 1, self.config.max_len)
        self.max_model_len, self.length_given = max_model_len or self.config.max_len, max_model_len is not None
        self.tokenizer = tokenizer_of(self.folder)
        eos = self.config.eos_token_ids | (self.tokenizer.eos_token_ids if self.tokenizer else frozenset())
        eos = frozenset(token_id for token_id in eos if 0 <= token_id < self.config.vocab_size)  # -1 stands for none
        self.requests = RequestBuilder(self.config.vocab_size, self.max_model_len, eos, self.tokenizer)
        self.ops = self.make_ops()
        self.model = self.make_model(dtype, progress)
        self.dtype = self.model.embed_tokens.weight.dtype

    def make_model(self, dtype: str, progress: bool) -> Model:
        """The model with its weights; a dry run (stage 09) has none."""
        return load_model(
            self.folder,
            self.config,
            device=self.device,
            dtype=dtype,
            max_len=self.max_model_len,
            ops=self.ops,
            progress=progress,
        )

    def make_ops(self) -> Ops:
        """The operations that serve this model."""
        return TORCH_OPS

    def shorten(self, max_model_len: int) -> None:
        """Lower `max_model_len` to what memory holds, and say so; a length that the caller gave stays."""
        if 0 < max_model_len < self.max_model_len and not self.length_given:
            message = f"max_model_len is {max_model_len} tokens, not {self.max_model_len}: the KV cache holds no more"
            warnings.warn(f"{message}; raise kv_cache_mb for longer sequences", stacklevel=3)
            self.max_model_len = max_model_len
            self.requests = replace(self.requests, max_model_len=max_model_len)

    @abstractmethod
    def run(self, requests: Sequence[PromptRequest]) -> Iterator[TokenEvent]:
        """Bring every answer of every request to its end, one event per token. Each stage does this in its own way."""

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, *, progress: bool = False
    ) -> list[RequestOutput]:
        """Answer one prompt or many (text, token ids, or both mixed); one output per prompt, in order.

        `progress` shows on stderr how many answers are complete and how many tokens come per second.
        """
        requests = self.requests.build(prompts, sampling_params)
        for _ in show_progress(self.run(requests), requests) if progress else self.run(requests):
            pass
        return [request.output() for request in requests]

    def stream(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None) -> Iterator[TokenEvent]:
        """As `generate`, token by token. What is wrong with the input is raised here, not at the first event."""
        return self.run(self.requests.build(prompts, sampling_params))

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, ready for an answer."""
        if self.tokenizer is None:
            raise ValueError("this model folder has no tokenizer; pass token ids to `generate`")
        return self.tokenizer.encode_chat(messages)

    def chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation, [{"role": "user", "content": "..."}], through the model's own template."""
        return self.generate([self.chat_ids(messages)], sampling_params)[0]


def pick_device(name: str) -> torch.device:
    """ "auto" is a GPU if PyTorch sees one, else the CPU. A GPU without a number is the one that is current now."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    match = re.fullmatch(r"auto|cuda(:(\d+))?", name)
    if match is None:
        raise ValueError(f"device {name!r} is not supported; supported are 'auto', 'cpu', 'cuda' and 'cuda:1'")
    if not count:
        raise ValueError(f"device {name!r}: PyTorch {torch.__version__} sees no CUDA GPU here; use 'cpu' or 'auto'")
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # to ask would take GPU memory
    number = int(match[2]) if match[2] else current
    if number >= count:
        there = ", ".join(f"cuda:{each}" for each in range(count))
        raise ValueError(f"device {name!r}: this machine has {count} CUDA GPU{'s' * (count > 1)}: {there}")
    return torch.device("cuda", number)
