"""From a folder to a model: the index decides, every tensor is used once, every weight filled, all refusals name it."""

import json
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference import hf
from reference.checkpoints import TINY, tiny_names
from stages import STAGES_DIR
from stages.s01_forward import loader
from stages.s01_forward.checkpoint import CheckpointError, stored_tensors
from stages.s01_forward.config import ModelConfig
from stages.s01_forward.families import UnsupportedModel
from stages.s01_forward.llm import LLM, hidden_states
from stages.s01_forward.loader import checkpoint_slots, load_model
from stages.s01_forward.sampling_params import SamplingParams
from tests.fixtures import each_family
from tests.scripted import Weights, edited

IDS = [5, 9, 100, 33, 250, 499, 511, 0]


def logits_of(folder: Path, **options: Any) -> torch.Tensor:
    model = load_model(folder, **options)
    return model.logits(hidden_states(model, IDS)).float()


def shard(source: Path, folder: Path, parts: list[list[str] | None], index: dict[str, str] | None = None) -> Path:
    """Copy a one-file checkpoint as shards; `None` stands for all tensors that the other parts leave."""
    weights = load_file(source / "model.safetensors")
    folder.mkdir()
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    named = {name for part in parts if part for name in part}
    weight_map = {}
    for number, part in enumerate(parts, 1):
        names = [n for n in weights if n not in named] if part is None else part
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file({n: weights[n] for n in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {}, "weight_map": weight_map | (index or {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


# ---- every tensor once, every weight filled --------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_names())
def test_names_and_places_cover_the_checkpoint(name, tiny):
    """Packed parameters are filled part by part: no stored tensor is left over, none is used twice, none overlaps."""
    stored, model = stored_tensors(tiny(name)), load_model(tiny(name))
    slots = dict(checkpoint_slots(model))
    assert set(slots) == set(stored)
    for tensor, slot in slots.items():
        assert torch.equal(slot, stored[tensor].read()), tensor
        slot.fill_(7.0)
    assert all((p == 7.0).all() for p in model.parameters()), "every element belongs to a slot"
    assert sum(s.numel() for s in slots.values()) == sum(p.numel() for p in model.parameters())


def test_packed_rows_are_q_k_v_and_gate_up(tiny):
    weights, layer = load_file(tiny("qwen2") / "model.safetensors"), load_model(tiny("qwen2")).layers[1]
    parts = [weights[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(parts))
    biases = [weights[f"model.layers.1.self_attn.{p}_proj.bias"] for p in "qkv"]
    assert torch.equal(layer.self_attn.qkv_proj.bias, torch.cat(biases))
    gate, up = (weights[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up"))
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat((gate, up)))


def test_experts_lie_side_by_side(tiny):
    weights, experts = (
        load_file(tiny("qwen3_moe") / "model.safetensors"),
        load_model(tiny("qwen3_moe")).layers[2].mlp.experts,
    )
    for e in range(8):
        prefix = f"model.layers.2.mlp.experts.{e}"
        gate, up, down = (weights[f"{prefix}.{p}_proj.weight"] for p in ("gate", "up", "down"))
        assert torch.equal(experts.gate_up_proj[e], torch.cat((gate, up)))
        assert torch.equal(experts.down_proj[e], down)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.weight"),
        ("qwen2", "model.layers.0.self_attn.v_proj.bias"),
        ("qwen2", "model.embed_tokens.weight"),
        ("qwen3-untied-g1", "model.layers.2.self_attn.q_norm.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.7.up_proj.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight"),
        ("llama-bf16", "model.norm.weight"),
    ],
)
def test_missing_tensor(name, tensor, tiny, tmp_path):
    folder = edited(tiny(name), tmp_path / "m", lambda weights: weights.pop(tensor))
    with pytest.raises(CheckpointError, match=rf"lacks {tensor}$"):
        load_model(folder)


def test_many_missing_tensors_are_counted(tiny, tmp_path):
    def cut(weights: Weights) -> None:
        for name in [n for n in weights if "layers.2" in n]:
            del weights[name]

    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.2\..* and 9 more tensors"):
        load_model(edited(tiny("qwen2"), tmp_path / "m", cut))


def test_left_over_tensor(tiny, tmp_path):
    folder = edited(
        tiny("qwen2"), tmp_path / "m", lambda w: w.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(64)})
    )
    with pytest.raises(CheckpointError, match=r"o_proj\.bias \(in model\.safetensors\), unknown to Qwen2ForCausalLM"):
        load_model(folder)


def test_old_rotary_tables_are_computed_anew(tiny, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = edited(tiny("qwen2"), tmp_path / "m", lambda w: w.update({name: torch.full((8,), 9.0)}))
    assert torch.equal(logits_of(folder), logits_of(tiny("qwen2")))


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [("model.layers.0.self_attn.q_proj.weight", (95, 64)), ("model.norm.weight", (1,)), ("lm_head.weight", (500, 64))],
)
def test_wrong_shape(tensor, shape, tiny, tmp_path):
    """Also one that would broadcast, and a head that was cut. NVIDIA/TensorRT-LLM#5912."""
    folder = edited(tiny("qwen2"), tmp_path / "m", lambda w: w.update({tensor: torch.ones(shape)}))
    with pytest.raises(
        CheckpointError, match=rf"{tensor} in model\.safetensors has shape \[.*config\.json makes it \["
    ):
        load_model(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64], ids=str)
def test_quantised_tensors_are_refused(dtype, tiny, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    folder = edited(tiny("qwen2"), tmp_path / "m", lambda w: w.update({name: w[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"{name} in model\.safetensors is \w+; supported are F32, F16, BF16"):
        load_model(folder)


def test_quantisation_that_the_config_tells_of_is_refused(tiny, tmp_path):
    keys = {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(UnsupportedModel, match=r"quantised \(gptq\)"):
        load_model(edited(tiny("qwen2"), tmp_path / "m", json_files={"config.json": keys}))


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["right shard first", "right shard last"])
def test_the_index_says_which_file_holds_a_tensor(first, tiny, tmp_path):
    """A shard that also holds an older copy does not win. vllm-project/vllm#54230."""
    folder = shard(tiny("qwen2"), tmp_path / "m", [["model.norm.weight", "lm_head.weight"], None])
    one, two = (folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    right, wrong = (one, two) if first else (two, one)
    for file, value in ((right, 1.0), (wrong, 7.0)):
        save_file(load_file(file) | {"model.norm.weight": torch.full((64,), value)}, file)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    index["weight_map"]["model.norm.weight"] = right.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert torch.equal(load_model(folder).norm.weight, torch.ones(64))


def test_stray_files_are_not_read(tiny, tmp_path):
    """A warning names them; copies in sub-folders are not even looked at. Blaizzy/mlx-vlm#1464."""
    folder = shard(tiny("qwen2"), tmp_path / "m", [["model.norm.weight"], None])
    expected = logits_of(folder)
    (folder / "original").mkdir()
    for stray in ("model.safetensors", "consolidated.safetensors", "original/model.safetensors"):
        save_file({"model.norm.weight": torch.full((64,), 7.0).half(), "stray": torch.ones(1)}, folder / stray)
    with pytest.warns(UserWarning, match=r"not read: consolidated\.safetensors, model\.safetensors$"):
        assert torch.equal(logits_of(folder), expected)


def test_one_file_without_an_index(tiny, tmp_path, recwarn):
    folder = edited(tiny("qwen3"), tmp_path / "m")
    assert not (folder / "model.safetensors.index.json").exists()
    assert torch.equal(logits_of(folder), logits_of(tiny("qwen3")))
    assert not recwarn.list


def test_missing_shard(tiny, tmp_path):
    folder = shard(tiny("qwen2"), tmp_path / "m", [["model.norm.weight"], None])
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00001-of-00002\.safetensors, which .*index\.json names"):
        load_model(folder)


def test_shard_without_its_tensor(tiny, tmp_path):
    folder = shard(tiny("qwen2"), tmp_path / "m", [["model.norm.weight"], None])
    save_file({"other": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors lacks model\.norm\.weight"):
        load_model(folder)


@pytest.mark.parametrize("target", ["../m.safetensors", "/m.safetensors", "a/m.safetensors", "..", "", "m.bin", 7])
def test_index_that_points_elsewhere(target, tiny, tmp_path):
    index = {"model.norm.weight": target}
    folder = shard(tiny("qwen2"), tmp_path / "m", [["model.norm.weight"], None], index)
    save_file(load_file(folder / "model-00001-of-00002.safetensors"), tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"index\.json.*model\.norm\.weight"):
        load_model(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_index_without_a_map(content, tiny, tmp_path):
    folder = edited(tiny("qwen2"), tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="weight_map"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(keep, tiny, tmp_path):
    folder = edited(tiny("qwen2"), tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        load_model(folder)


def test_header_that_lies(tiny, tmp_path):
    folder = edited(tiny("qwen2"), tmp_path / "m")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        load_model(folder)


def test_other_formats_are_named(tiny, tmp_path):
    """What is there is told, and a pickle is never opened."""
    folder = edited(tiny("qwen2"), tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*it holds pytorch_model\.bin"):
        load_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="no weights at all"):
        load_model(folder)


def test_files_are_read_in_parallel(tiny, monkeypatch):
    """Two of the shards are open at the same time: each waits for the other at its first tensor."""
    barrier, lock, opened = threading.Barrier(2, timeout=20), threading.Lock(), []

    def open_and_wait(file: str, framework: str) -> Any:
        with lock:
            opened.append(file)
            first_two = len(opened) <= 2
        if first_two:
            barrier.wait()
        return loader_open(file, framework=framework)

    loader_open = loader.safe_open
    monkeypatch.setattr(loader, "safe_open", open_and_wait)
    load_model(tiny("qwen3"))
    assert sorted(opened) == sorted(str(p) for p in tiny("qwen3").glob("*.safetensors"))


# ---- heads that are tied and heads that are not ----------------------------------------------------------------------


@pytest.mark.parametrize("parts", [[["lm_head.weight"], None], [None, ["lm_head.weight"]]], ids=["before", "after"])
def test_untied_head_is_used_wherever_it_lies(parts, tiny, tmp_path):
    """Stored before or after the embedding. sgl-project/sglang#18024."""
    folder = shard(tiny("qwen2"), tmp_path / "m", parts)
    assert (logits_of(folder) - hf.logits(tiny("qwen2"), IDS)).abs().max() <= 1e-4


@each_family
@pytest.mark.parametrize("head", ["none", "equal", "other"])
def test_tied_head_as_hugging_face_has_it(family, head, tiny, tmp_path):
    """None or an equal one stored: the embedding. A differing one: Hugging Face keeps it. sgl-project/sglang#18024."""
    embedding: list[torch.Tensor] = []

    def edit(weights: Weights) -> None:
        weights.pop("lm_head.weight", None)
        embedding.append(weights["model.embed_tokens.weight"])
        if head != "none":
            weights["lm_head.weight"] = embedding[0].clone() if head == "equal" else embedding[0].flip(0).clone()

    folder = edited(tiny(family), tmp_path / f"{family}-{head}", edit, {"config.json": {"tie_word_embeddings": True}})
    model = load_model(folder)
    hidden = hidden_states(model, IDS)
    expected = embedding[0].flip(0) if head == "other" else embedding[0]
    torch.testing.assert_close(model.logits(hidden), hidden @ expected.T)
    assert (model.logits(hidden) - hf.logits(folder, IDS)).abs().max() <= 1e-4
    assert model.config.tie_word_embeddings == (head != "other")


def test_untied_without_a_head(tiny, tmp_path):
    """Never zeros, never random logits. QwenLM/Qwen3-VL-Embedding#89."""
    folder = edited(tiny("qwen2"), tmp_path / "m", lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"no lm_head\.weight, and config\.json says tie_word_embeddings: False"):
        load_model(folder)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": ..., "torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": ...}, torch.bfloat16),  # nothing said: as the tensors are stored
        ({"dtype": None}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "float16"}, torch.float16),
    ],
    ids=str,
)
def test_dtype_of_the_checkpoint(keys, expected, tiny, tmp_path):
    """Never a silent fp16 or fp32. sgl-project/sglang#37064."""
    folder = edited(tiny("llama-bf16"), tmp_path / "m", json_files={"config.json": keys})
    assert {p.dtype for p in load_model(folder).parameters()} == {expected}


@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16", torch.float32], ids=str)
def test_dtype_that_the_caller_asks_for(wanted, tiny):
    model = load_model(tiny("llama-bf16"), dtype=wanted)
    expected = wanted if isinstance(wanted, torch.dtype) else getattr(torch, wanted)
    assert {p.dtype for p in model.parameters()} == {expected}
    stored = stored_tensors(tiny("llama-bf16"))["model.norm.weight"].read()
    assert torch.equal(model.norm.weight, stored.to(expected))
    assert model.cos.dtype == torch.float32, "angles are never rounded"


def test_bf16_computed_in_fp32(tiny):
    folder = tiny("llama-bf16")
    assert (logits_of(folder, dtype="float32") - hf.logits(folder, IDS, torch.float32)).abs().max() <= 1e-4


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_nothing_is_read_before_all_is_checked(tiny, tmp_path, monkeypatch):
    folder = edited(tiny("qwen2"), tmp_path / "m", lambda weights: weights.pop("model.norm.weight"))
    monkeypatch.setattr(loader, "safe_open", None)  # calling it would raise TypeError
    with pytest.raises(CheckpointError, match="norm"):
        load_model(folder)


def test_a_config_that_is_far_too_large_is_told_before_memory_is_taken(tiny, tmp_path):
    """A 2^40 wide MLP fits into no machine: the stored shape is compared first."""
    folder = edited(tiny("qwen2"), tmp_path / "m", json_files={"config.json": {"intermediate_size": 2**40}})
    with pytest.raises(CheckpointError, match=r"has shape \[\d+.*config\.json makes it \[\d{13}"):
        load_model(folder)


def test_the_checkpoint_is_not_written_to(tiny):
    """Weights are copied out of the mapped files."""
    before = {f.name: f.read_bytes() for f in tiny("qwen2").glob("*.safetensors")}
    for p in load_model(tiny("qwen2")).parameters():
        p.zero_()
    assert before == {f.name: f.read_bytes() for f in tiny("qwen2").glob("*.safetensors")}


def test_progress_goes_to_stderr(tiny, capsys, monkeypatch):
    """What the model says may be piped from stdout."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # draw it although nobody looks
    load_model(tiny("qwen3"), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Loading weights" in shown.err
    load_model(tiny("qwen3"))
    assert capsys.readouterr() == ("", "")


def test_length_of_the_tables(tiny):
    assert len(load_model(tiny("qwen2"), max_len=10).cos) == 10
    assert len(load_model(tiny("qwen3-yarn")).cos) == ModelConfig.from_dir(tiny("qwen3-yarn")).max_len == 256
    assert len(LLM(tiny("qwen2"), max_model_len=20).model.cos) == 20


def test_a_folder_without_a_tokenizer_answers_ids(tiny, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny("qwen2") / name).read_bytes())
    llm = LLM(folder)
    (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert (output.text, len(output.token_ids)) == ("", 2)
    with pytest.raises(ValueError, match=r"stop strings \['x'\] need a tokenizer"):
        llm.generate([[5, 6]], SamplingParams(stop="x"))
    with pytest.raises(ValueError, match="prompt 0 is text"):
        llm.generate("Hello")
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "Hello"}])
    assert TINY["qwen2"].tied is False


def test_a_start_imports_nothing_that_is_not_needed(tiny):
    """Llama's config in transformers would bring what models are trained with, and some calls of torch bring sympy."""
    check = (
        "import sys, torch; bare = set(sys.modules);"
        "from stages.s01_forward.llm import LLM; LLM(sys.argv[1]);"
        "heavy = {'accelerate', 'sympy', 'torch.distributed.tensor'};"
        "print(sorted(heavy & (set(sys.modules) - bare)))"
    )
    command = [sys.executable, "-c", check, str(tiny("llama"))]
    done = subprocess.run(command, cwd=STAGES_DIR.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
