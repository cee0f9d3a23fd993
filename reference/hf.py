"""The oracle: Hugging Face's eager forward, one sequence at a time, in fp32 unless told otherwise.

Eager attention is the plain formula (matmul, softmax, matmul), so it is the same on every platform. There is no cache:
each greedy token runs the whole sequence again, as slow and as simple as it gets.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from reference.quiet import quiet_bars


def load(folder: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """The `AutoModelForCausalLM` of `folder` in eval mode on the CPU; the last four are kept.

    Folders are told apart by path: a folder that is written again under the same path needs `load.cache_clear`.
    """
    return _load(str(Path(folder).resolve()), dtype)


@lru_cache(maxsize=4)
def _load(folder: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet_bars():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True
        )
    return model.eval()


@torch.inference_mode()
def logits(folder: str | Path, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of every position of one sequence: ids [T] -> fp32 [T, V]. Row t scores the token at t + 1."""
    model = load(folder, dtype)
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()  # [T, V]


@torch.inference_mode()
def hidden_states(folder: str | Path, ids: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Residual stream after each decoder layer, before the final norm: L tensors [T, H].

    HF's own `output_hidden_states` ends with the state *after* the final norm, so the layers are read with hooks.
    """
    model = load(folder, dtype)
    states: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output)[0].clone())  # [T, H]

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    try:
        model(torch.tensor([list(ids)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def greedy(
    folder: str | Path,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos: int | Iterable[int] = (),
    dtype: torch.dtype = torch.float32,
) -> list[int]:
    """Greedy continuation of one prompt, at most `max_new_tokens` ids, ending with (and including) the first of `eos`.

    `eos` is empty by default: generation then runs to the cap. `eos_ids(folder)` gives the model's own set.
    """
    stop = {eos} if isinstance(eos, int) else set(eos)
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        ids.append(int(logits(folder, ids, dtype)[-1].argmax()))
        if ids[-1] in stop:
            break
    return ids[len(prompt_ids) :]


def eos_ids(folder: str | Path) -> set[int]:
    """The model's end tokens: the union of config, generation config and tokenizer."""
    from transformers import AutoTokenizer

    model = load(folder)
    found: set[int] = set()
    tokenizer_eos = AutoTokenizer.from_pretrained(folder, local_files_only=True).eos_token_id
    for value in (model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer_eos):
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return found
