"""The oracle, the checkpoints, the harness, the pictures: what all else is checked against, checked itself."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from reference import draw, hf
from reference.bench import peak_memory, plots, roofline, workloads
from reference.bench.harness import Measurement, Result, Timing, compare, measure
from reference.bench.report import markdown_table, quantity
from reference.checkpoints import TINY, build_tiny
from reference.demo import installed_gguf
from reference.folders import build_folder
from reference.hf_sampling import probabilities, processed_logits
from tests.fixtures import FAMILIES, each_family

PROMPT = [40, 311, 7, 99, 256, 12, 480, 33]
SHARDED = [name for name, model in TINY.items() if model.max_shard_size != "1GB"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


class TestTinyCheckpoints:
    @pytest.mark.parametrize("name", TINY)
    def test_round_trip_through_auto_model(self, tiny, name):
        folder, stored = tiny(name), weights_of(tiny(name))
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.model_type == TINY[name].family
        assert next(iter(stored.values())).dtype == model.dtype == getattr(torch, TINY[name].dtype)
        assert ("lm_head.weight" in stored) != TINY[name].tied
        model.save_pretrained(again := folder.parent / f"{name}-again")
        resaved = weights_of(again)
        assert resaved.keys() == stored.keys()
        assert all(torch.equal(resaved[key], stored[key]) for key in stored)

    @pytest.mark.parametrize("name", TINY)
    def test_no_parameter_is_left_at_a_value_that_hides_mistakes(self, tiny, name):
        for key, value in weights_of(tiny(name)).items():
            value = value.float()
            assert value.std() > 0.05, key
            assert len(value.unique()) > value.numel() / 4 or TINY[name].dtype == "bfloat16", key

    def test_the_same_seed_gives_the_same_weights(self, tmp_path):
        first, same, other = (build_tiny("qwen3_moe", tmp_path / n, seed) for n, seed in (("a", 0), ("b", 0), ("c", 1)))
        a, b, c = map(weights_of, (first, same, other))
        assert all(torch.equal(a[key], b[key]) for key in a)
        assert not any(torch.equal(a[key], c[key]) for key in a)

    def test_together_they_cover_the_odd_shapes(self):
        assert {model.heads // model.kv_heads for model in TINY.values()} == {1, 3, 7}
        for family in FAMILIES:
            members = [model for model in TINY.values() if model.family == family]
            assert {model.tied for model in members} == {True, False}
            assert any(model.head_dim and model.hidden != model.heads * model.head_dim for model in members)

    @pytest.mark.parametrize("name", SHARDED)
    def test_sharded_ones_have_several_files_and_an_index(self, tiny, name):
        index = json.loads((tiny(name) / "model.safetensors.index.json").read_text(encoding="utf-8"))
        files = {path.name for path in tiny(name).glob("*.safetensors")}
        assert len(files) > 1 and set(index["weight_map"].values()) == files

    @each_family
    def test_greedy_tokens_vary_and_are_no_near_ties(self, tiny, family):
        rng = np.random.default_rng(1)
        distinct, firsts, margins = [], set(), []
        for _ in range(50):
            ids = rng.integers(0, 500, rng.integers(1, 30)).tolist()
            new = hf.greedy(tiny(family), ids, 6)
            top = hf.logits(tiny(family), ids)[-1].topk(2).values
            distinct.append(len(set(new)))
            firsts.add(new[0])
            margins.append(float(top[0] - top[1]))
        assert np.mean(distinct) > 3
        assert len(firsts) > 25
        assert min(margins) > 1e-3

    def test_unknown_name_lists_the_known_ones(self, tmp_path):
        with pytest.raises(ValueError, match="gpt5.*qwen3_moe-raw"):
            build_tiny("gpt5", tmp_path / "x")


class TestTinyTokenizer:
    TEXT = "Hello, wörld! 你好 🙂👩‍💻\n\tdef f(x):  return 1e-5 * 2024<|im_end|> done"

    @pytest.mark.parametrize("name", FAMILIES)
    def test_text_round_trips_and_both_loaders_agree(self, tiny, name):
        auto = AutoTokenizer.from_pretrained(tiny(name))
        plain = Tokenizer.from_file(str(tiny(name) / "tokenizer.json"))
        ids = auto.encode(self.TEXT)
        assert ids == plain.encode(self.TEXT).ids
        assert auto.decode(ids) == plain.decode(ids, skip_special_tokens=False) == self.TEXT
        assert max(ids) < len(auto) == 500

    def test_special_tokens_and_chat_template(self, tiny):
        tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == (None, "<|im_end|>", 2)
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert text == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert hf.eos_ids(tiny("llama")) == {0, 2}


class TestOracle:
    @each_family
    def test_logits_equal_the_head_of_the_last_hidden_state(self, tiny, family):
        model = hf.load(tiny(family))
        states = hf.hidden_states(tiny(family), PROMPT)
        assert [tuple(state.shape) for state in states] == [(8, model.config.hidden_size)] * TINY[family].layers
        logits = hf.logits(tiny(family), PROMPT)
        assert logits.shape == (8, 512) and logits.dtype == torch.float32
        with torch.inference_mode():
            torch.testing.assert_close(model.lm_head(model.model.norm(states[-1])), logits)

    @each_family
    def test_greedy_equals_generate(self, tiny, family):
        ours = hf.greedy(tiny(family), PROMPT, 10)
        theirs = hf.load(tiny(family)).generate(
            torch.tensor([PROMPT]), max_new_tokens=10, do_sample=False, eos_token_id=None
        )
        assert ours == theirs[0, len(PROMPT) :].tolist()

    def test_greedy_stops_at_eos_and_keeps_it(self, tiny):
        free = hf.greedy(tiny("llama"), PROMPT, 8)
        assert hf.greedy(tiny("llama"), PROMPT, 8, eos=free[3]) == free[: free.index(free[3]) + 1]

    def test_bfloat16_is_another_model(self, tiny):
        a, b = (hf.logits(tiny("llama"), PROMPT, dtype) for dtype in (torch.float32, torch.bfloat16))
        assert 1e-4 < (a - b).abs().max() < 1.0

    def test_sampling_keeps_what_each_setting_says(self):
        logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
        assert processed_logits(logits, top_k=2).isinf().tolist() == [False, False, True, True]
        torch.testing.assert_close(probabilities(logits, temperature=0.5), (logits * 2).softmax(-1))
        assert probabilities(logits, top_p=0.7).gt(0).sum() == 2  # 0.644 alone is below 0.7
        assert probabilities(logits, min_p=0.3).gt(0).sum() == 2  # 0.237 >= 0.3 * 0.644 > 0.087
        assert processed_logits(logits, [0, 3], repetition_penalty=2.0).tolist() == [1.0, 1.0, 0.0, -2.0]


class TestDemoModel:
    QUESTION = "What is the capital of France? Answer in one sentence."

    def test_config_is_the_original_one(self, demo_folder):
        config = json.loads((demo_folder / "config.json").read_text(encoding="utf-8"))
        wanted = {"model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
        wanted |= {"eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}
        assert {key: config[key] for key in wanted} == wanted
        assert hf.eos_ids(demo_folder) == {2}

    def test_tokenizer_splits_digits(self, demo_folder):
        assert AutoTokenizer.from_pretrained(demo_folder).tokenize("a  2024") == ["a", "ĠĠ", "2", "0", "2", "4"]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_it_knows_the_capital_of_france(self, demo_folder, dtype):
        tokenizer = AutoTokenizer.from_pretrained(demo_folder)
        chat = [{"role": "user", "content": self.QUESTION}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert "You are a helpful AI assistant named SmolLM" in text
        prompt = tokenizer.encode(text, add_special_tokens=False)
        answer = hf.greedy(demo_folder, prompt, 24, hf.eos_ids(demo_folder), dtype)
        assert "Paris" in tokenizer.decode(answer)
        assert answer[-1] == 2

    def test_missing_package_is_not_found(self, monkeypatch):
        monkeypatch.setattr("reference.demo.PACKAGE", "a-package-that-nobody-has-installed")
        assert installed_gguf() is None


class TestFolders:
    def test_a_failing_build_leaves_nothing(self, tmp_path):
        def build(folder: Path) -> None:
            (folder / "half").write_text("x", encoding="utf-8")
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            build_folder(tmp_path / "target", build)
        assert list(tmp_path.iterdir()) == []

    def test_the_first_of_two_builders_wins(self, tmp_path):
        def slow(folder: Path) -> None:
            build_folder(tmp_path / "target", lambda fast: write(fast, "fast"))
            write(folder, "slow")

        def write(folder: Path, text: str) -> None:
            (folder / "file").write_text(text, encoding="utf-8")

        build_folder(tmp_path / "target", slow)
        assert (tmp_path / "target" / "file").read_text(encoding="utf-8") == "fast"
        assert [path.name for path in tmp_path.iterdir()] == ["target"]


class TestHarness:
    def test_warmup_does_not_count_and_functions_take_turns(self):
        calls: list[str] = []
        timings = compare({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, warmup=1, repeats=3)
        assert calls == ["a", "b"] * 4
        assert all(len(t.times) == 3 and t.min <= t.median <= t.max for t in timings.values())
        with pytest.raises(ValueError, match="repeats.*0"):
            measure(lambda: None, repeats=0)

    def test_result_survives_the_file_and_becomes_a_table(self, tmp_path):
        timing = Timing.of([2.0, 1.0, 4.0])
        rows = [
            Measurement.rate("ours | fp32", timing, 100, "tok/s", roofline=0.25),
            Measurement.single("peak", 3 * 2**20, "B", note="anonymous"),
        ]
        result = Result("r", "it is fast", rows, loses="on one core")
        path = result.save(tmp_path)
        assert Result.load("r", tmp_path) == result
        assert (result["ours | fp32"].low, result["ours | fp32"].median, result["ours | fp32"].high) == (25, 50, 100)
        table = markdown_table(path)
        assert r"| ours \| fp32 | 50 tok/s | 25 tok/s to 100 tok/s (3 runs) | 25 % |  |" in table
        assert "| peak | 3 MiB |  |  | anonymous |" in table
        assert "**Where it loses:** on one core" in table and result.versions["torch"] in table
        assert str(Path.cwd()) not in path.read_text(encoding="utf-8")
        with pytest.raises(KeyError, match="no measurement 'x'"):
            result["x"]

    def test_quantities(self):
        cases = [(0.0042, "s"), (3e-5, "s"), (12.34, "s"), (1536, "B"), (1, "B"), (21_640.2, "tok/s"), (0.0, "s")]
        assert [quantity(*case) for case in cases] == [
            *("4.2 ms", "30 µs", "12.3 s", "1.5 KiB", "1 B", "21,640 tok/s", "0 s")
        ]

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the anonymous memory of a process")
    def test_peak_memory_sees_what_was_freed_again(self):
        mib = 2**20
        # randbytes makes a number of this size first, and the bytes from it: two at the peak, one left.
        peak = peak_memory.peak_memory("random:randbytes", [128 * mib])
        assert peak is not None
        assert 240 * mib < peak.added < 300 * mib
        assert 120 * mib < peak.after - peak.before < 150 * mib
        with pytest.raises(RuntimeError, match="ValueError.*'twelve'"):
            peak_memory.peak_memory("builtins:int", ["twelve"])

    def test_report_needs_no_torch(self):
        code = "import sys, reference.bench.report; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[1]).returncode == 0


class TestWorkloadsAndRoofline:
    def test_workloads_are_drawn_in_the_agreed_order(self):
        made = workloads.workloads()
        assert tuple(made) == workloads.NAMES
        sizes = {name: (len(w.prompts), w.prompt_tokens, w.output_tokens) for name, w in made.items()}
        assert sizes["mixed"] == (256, 149_269, 146_528)
        assert sizes["decode_heavy"] == (256, 8_192, 262_144)
        assert sizes["shared_prefix"] == (64, 64 * 2112, 2048)
        assert len({w.prompts[0][:2048] for w in made.values() if w.name == "shared_prefix"}) == 1
        assert made["shared_prefix"].prompts[0][:2048] == made["shared_prefix"].prompts[63][:2048]

    def test_floor_by_hand(self):
        shape = roofline.Shape(layers=1, hidden=2, heads=2, kv_heads=1, head_dim=4, intermediate=3, vocab=10)
        assert shape.body == 2 * 8 + 2 * (2 * 4) + 8 * 2 + 3 * 2 * 3 == 66
        assert (shape.head, shape.kv_bytes()) == (20, 16)
        slow_memory, slow_maths = roofline.Machine(1.0, math.inf), roofline.Machine(math.inf, 1.0)
        assert roofline.decode_floor(shape, slow_memory, [5, 7]) == 2 * 86 + 12 * 16 + 2 * 10 * 2
        assert roofline.decode_floor(shape, slow_maths, [5, 7]) == 2 * 86 * 2
        assert roofline.prefill_floor(shape, slow_maths, [3]) == 2 * 66 * 3 + 2 * 2 * 4 * 9

    def test_real_shape(self):
        qwen = roofline.Shape(28, 1024, 16, 8, 128, 3072, 151_936)
        assert qwen.kv_bytes() == 114_688
        assert 1 / roofline.decode_floor(qwen, roofline.H200, [1000]) == pytest.approx(3290, rel=1e-3)

    @each_family
    def test_shape_of_a_checkpoint_counts_its_weights(self, tiny, family):
        stored = weights_of(tiny(family))
        shape, model = roofline.Shape.from_dir(tiny(family)), TINY[family]
        attention = sum(w.numel() for key, w in stored.items() if "self_attn" in key and w.ndim == 2)
        assert shape.layers * model.hidden * shape.head_dim * 2 * (model.heads + model.kv_heads) == attention
        if not shape.experts:
            mlp = sum(w.numel() for key, w in stored.items() if ".mlp." in key)
            assert shape.body == attention + mlp


class TestPictures:
    def test_bars_and_lines(self, tmp_path):
        one = Measurement("one", 2.0, 1.0, 3.0, "tok/s", 3)
        for picture in (plots.bars([one, one]), plots.lines({"a": [one, one], "b": [one, one]}, [1, 2], "batch")):
            svg = picture.save(tmp_path / "p.svg").read_text(encoding="utf-8")
            assert svg == picture._repr_svg_() and "tok/s" in svg and "#808080" in svg
        with pytest.raises(ValueError, match="one unit"):
            plots.bars([one, Measurement.single("two", 1, "s")])
        with pytest.raises(ValueError, match="'a' has 1 measurements for 2"):
            plots.lines({"a": [one]}, [1, 2], "batch")

    def test_kv_blocks_show_owners_and_the_dummy(self):
        svg = draw.kv_blocks([None, "Ada", "Bob", "Ada", None], [0, 16, 4, 7, 0], 16)._repr_svg_()
        assert all(word in svg for word in ("dummy", "Ada", "Bob"))
        with pytest.raises(ValueError, match="block 1 uses 17 slots"):
            draw.kv_blocks([None, "A"], [0, 17], 16)

    def test_an_owner_keeps_its_colour_from_picture_to_picture(self):
        def colours(*owners: str) -> list[str]:
            patches = draw.kv_blocks([None, *owners], [0] + [4] * len(owners), 4).axes[0].patches
            return [patch.get_facecolor() for patch in patches if patch.get_linewidth() == 0]

        a, b, c = colours("A", "B", "C")
        assert len({a, b, c}) == 3
        assert colours("B", "C", "D")[:2] == [b, c]
        assert len(set(colours("1", "2", "3", "1, 2, 3"))) == 4, "sharing a block is a colour of its own"

    def test_mask_weights_and_rope(self):
        visible = [patch for patch in draw.causal_mask(2, 5).axes[0].patches if patch.get_alpha() == 1.0]
        assert len(visible) == 4 + 5
        weights = torch.tensor([[1.0, 0.0], [0.3, 0.7]])
        assert "cat" in draw.attention_weights(weights, ["the", "cat"])._repr_svg_()
        assert "pair 3" in draw.rope_rotation([1, 0.1, 0.01, 0.001])._repr_svg_()
        with pytest.raises(ValueError, match="1 to 2"):
            draw.causal_mask(3, 2)
