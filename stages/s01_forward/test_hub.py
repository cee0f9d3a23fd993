"""What a person may type as the model. Nothing here goes online: the hub's client is replaced."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from stages.s01_forward.hub import resolve_model
from stages.s01_forward.llm import LLM


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """`hub(result)`: the hub hands out this folder, or raises this error; gives the calls that were made."""

    def answer(result):
        calls = []

        def snapshot_download(repo_id, **options):
            calls.append((repo_id, options))
            if isinstance(result, Exception):
                raise result
            return str(result)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    return answer


def http_error(kind):
    return kind("401", response=SimpleNamespace(headers={}, request=None, status_code=401))


def test_a_folder_is_itself(tiny, hub):
    calls = hub(RuntimeError("not asked"))
    assert resolve_model(tiny("qwen2")) == tiny("qwen2")
    assert resolve_model(str(tiny("qwen2"))) == tiny("qwen2")
    assert calls == []


def test_demo_is_the_demo_model(monkeypatch, tmp_path, hub):
    calls = hub(RuntimeError("not asked"))
    monkeypatch.setattr("reference.checkpoints.demo_model", lambda: tmp_path)
    assert resolve_model("demo") == tmp_path
    assert calls == []


def test_a_hub_id_is_fetched_without_what_is_not_needed(hub, tmp_path):
    calls = hub(tmp_path)
    assert resolve_model("Qwen/Qwen3-0.6B") == tmp_path
    ((repo, options),) = calls
    assert repo == "Qwen/Qwen3-0.6B"
    wanted = list(
        huggingface_hub.utils.filter_repo_objects(
            [
                "config.json",
                "generation_config.json",
                "model-00001-of-00002.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json",
                "chat_template.jinja",
                "pytorch_model.bin",
                "original/consolidated.00.pth",
                "original/model.safetensors",
                "modeling_custom.py",
                "README.md",
            ],
            **{k: v for k, v in options.items() if k.endswith("_patterns")},
        )
    )
    assert wanted == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
    ]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.HFValidationError("bad"), "'no/such/model' is neither a folder here nor a hub id"),
        (errors.LocalEntryNotFoundError("offline"), "the hub cannot be reached.*HF_ENDPOINT.*'demo'"),
        (http_error(errors.RepositoryNotFoundError), "the hub has no model.*HF_TOKEN"),
        (http_error(errors.GatedRepoError), "HF_TOKEN"),
        (http_error(errors.HfHubHTTPError), "did not hand out.*401"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_say_what_to_do(error, words, hub):
    hub(error)
    with pytest.raises(FileNotFoundError, match=words):
        resolve_model("no/such/model")


def test_offline_is_respected(monkeypatch, tmp_path):
    """The real client, an empty cache, HF_HUB_OFFLINE: no waiting for a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="'some/model' is not a folder here, not in the hub's cache"):
        resolve_model("some/model")


@pytest.mark.parametrize("name", ["no such model", "a/b/c", "../nowhere", "x" * 200])
def test_names_that_are_neither(name):
    """Refused by the client itself, without a request."""
    with pytest.raises(FileNotFoundError, match="neither a folder here nor a hub id"):
        resolve_model(name)


def test_a_file_is_no_model(tiny):
    with pytest.raises(ValueError, match=r"model\.safetensors is a file; a model is a folder"):
        resolve_model(tiny("qwen2") / "model.safetensors")


def test_an_empty_folder_is_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a model folder: it has no config\.json"):
        LLM(tmp_path)


def test_loading_never_runs_code_of_a_checkpoint(tiny, tmp_path):
    """A folder that asks for its own modelling code gets an error or is read as what it says it is, never run."""
    from tests.scripted import edited

    keys = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"}}
    folder = edited(tiny("qwen2"), tmp_path / "m", json_files={"config.json": keys})
    Path(folder / "modeling_evil.py").write_text("raise SystemExit('this code ran')\n", encoding="utf-8")
    assert LLM(folder).generate([[5]])[0].finish_reason in ("stop", "length")
