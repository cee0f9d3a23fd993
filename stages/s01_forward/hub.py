"""Read later: from what a person types as the model to a folder on this disk."""

from __future__ import annotations

from pathlib import Path

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def resolve_model(model: str | Path, *, progress: bool = False) -> Path:
    """A folder, a hub id such as "Qwen/Qwen3-0.6B", or "demo" (SmolLM2-135M-Instruct, which needs no hub).

    Downloads go through huggingface-hub, so HF_HOME, HF_ENDPOINT (mirrors), HF_TOKEN and HF_HUB_OFFLINE act as usual.
    """
    if str(model) == "demo":
        from reference.checkpoints import demo_model

        return demo_model()
    if Path(model).is_dir():
        return Path(model)
    if Path(model).exists():
        raise ValueError(f"{model} is a file; a model is a folder with config.json, safetensors files and a tokenizer")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        return Path(snapshot_download(str(model), allow_patterns=PATTERNS, ignore_patterns=["*/*"]))
    except HFValidationError:
        raise FileNotFoundError(f"{model!r} is neither a folder here nor a hub id such as 'Qwen/Qwen3-0.6B'") from None
    except RepositoryNotFoundError:
        raise FileNotFoundError(f"the hub has no model {model!r} (private ones need HF_TOKEN)") from None
    except LocalEntryNotFoundError:
        raise FileNotFoundError(
            f"{model!r} is not a folder here, not in the hub's cache, and the hub cannot be reached; "
            "go online, set HF_ENDPOINT to a mirror, or use the model 'demo'"
        ) from None
    except HfHubHTTPError as error:
        raise FileNotFoundError(f"the hub did not hand out {model!r}: {error}") from None
