"""Text to ids and back, held against Hugging Face, for the two ways in which tokenizers write bytes."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stages.s01_forward.text_stream import TextStream
from stages.s01_forward.tokenizer import Tokenizer, plain_config, unicode_to_byte

KNOWN = 500  # ids of the tiny tokenizer; the models have 512


@pytest.fixture(scope="session")
def byte_level(tiny: Callable[[str], Path]) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    return Tokenizer(tiny("qwen2")), AutoTokenizer.from_pretrained(tiny("qwen2"))


def save(folder: Path, **special: object) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """Both tokenizers of a folder that holds `tokenizer_object` and these special tokens."""
    PreTrainedTokenizerFast(clean_up_tokenization_spaces=False, **special).save_pretrained(folder)
    return Tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """As Llama 2 and TinyLlama: words begin with U+2581, unknown characters are bytes, one leading space is dropped."""
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Backend

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "\u2581Hello", "\u2581new", "\u2581world", "\u2581\u2581", "!", "é"]
    backend = Backend(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in words[:3]])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("sentence-piece")
    template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    return save(
        folder, tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_encode_as_hugging_face(text, byte_level):
    mine, theirs = byte_level
    assert mine.encode(text) == theirs(text)["input_ids"]


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 511), max_size=30))
def test_decode_as_hugging_face(ids, byte_level):
    """Any ids, broken characters and ids without a token among them. pegainfer-project/pegainfer#676."""
    mine, theirs = byte_level
    assert mine.decode(ids) == theirs.decode([i for i in ids if i < KNOWN], skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_text_comes_back(text, byte_level):
    from unicodedata import normalize

    mine, _ = byte_level
    assert mine.decode(mine.encode(text)) == normalize("NFC", text)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 511), st.sampled_from([172, 108, 233, 261])), max_size=30))
def test_streamed_text_is_the_decoded_text(ids, byte_level):
    """Token by token, in whole characters, with an unfinished one at the end replaced. antonellof/ferrox#124."""
    mine, _ = byte_level
    stream = TextStream(mine)
    deltas = [stream.push(token_id) for token_id in ids]
    assert "".join(deltas) + stream.finish() == mine.decode(ids)


def test_bytes_of_a_split_character(byte_level):
    """Those of the token, not those of U+FFFD. ollama/ollama#13497."""
    mine, theirs = byte_level
    tokens = [next(c for c, byte in unicode_to_byte().items() if byte == b) for b in "😀".encode()]
    pieces = [mine.token_bytes(i) for i in theirs.convert_tokens_to_ids(tokens)]
    assert pieces == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert b"".join(pieces).decode() == "😀"


def test_the_table_of_bytes_is_complete():
    assert sorted(unicode_to_byte().values()) == list(range(256))
    assert (unicode_to_byte()["Ġ"], unicode_to_byte()["Ċ"], unicode_to_byte()["A"]) == (32, 10, 65)


def test_special_tokens_are_no_text(byte_level):
    """kserve/kserve#4490."""
    mine, _ = byte_level
    ids = mine.encode("<|im_start|>user\nHi<|im_end|>")
    assert {1, 2} <= set(ids)
    assert mine.decode(ids) == "user\nHi"
    assert mine.token_bytes(2) == b""
    assert mine.token_bytes(2, skip_special=False) == b"<|im_end|>"
    assert (mine.eos_token_ids, mine.has_chat_template) == ({2}, True)


def test_added_tokens_that_are_not_special_are_text(tiny, tmp_path):
    """`<tool_call>` and its kind, and one with characters beyond the table of bytes."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(tiny("llama") / "tokenizer.json"))
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("→ 2", special=False)])
    mine, theirs = save(tmp_path, tokenizer_object=backend, eos_token="<|im_end|>")
    ids = mine.encode("a<tool_call>b→ 2<|im_end|>")
    assert {500, 501, 2} <= set(ids)
    assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a<tool_call>b→ 2"


def test_chat_ids_are_those_of_the_template(byte_level):
    mine, theirs = byte_level
    messages = [{"role": "user", "content": "Hi <|im_end|> 😀"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert mine.encode_chat(messages) == expected


def test_old_folders_keep_the_template_in_their_config(tiny, tmp_path):
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((tiny("qwen2") / name).read_bytes())
    keys = json.loads((tiny("qwen2") / "tokenizer_config.json").read_text(encoding="utf-8"))
    keys["eos_token"] = {"content": "<|im_end|>", "__type": "AddedToken"}
    without = Tokenizer(tiny("qwen2"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(keys), encoding="utf-8")
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(tmp_path).encode_chat([{"role": "user", "content": "Hi"}])
    keys["chat_template"] = (tiny("qwen2") / "chat_template.jinja").read_text(encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(keys), encoding="utf-8")
    again = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    assert again.encode_chat(messages) == without.encode_chat(messages)
    assert again.eos_token_ids == {2}


def test_one_bos_and_no_second(sentence_piece):
    """Added to plain text; written by the template to a chat. sgl-project/sglang#888."""
    mine, theirs = sentence_piece
    assert mine.encode("Hello") == theirs("Hello")["input_ids"]
    assert mine.encode("Hello").count(1) == 1
    messages = [{"role": "user", "content": "new"}]
    chat = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert mine.encode_chat(messages) == chat
    assert chat.count(1) == 1
    assert mine.encode("") == [1], "an empty prompt has a token to start from here"


def test_spaces_between_words_stay(sentence_piece):
    """Each piece alone would lose its space; the whole text loses the first one. huggingface/transformers#28776."""
    mine, theirs = sentence_piece
    ids = theirs.convert_tokens_to_ids(["\u2581Hello", "\u2581new", "\u2581world"])
    assert mine.decode(ids) == theirs.decode(ids) == "Hello new world"
    stream = TextStream(mine)  # an answer goes on from its prompt: decode(prompt + answer) minus decode(prompt)
    assert [stream.push(i) for i in ids] == [" Hello", " new", " world"]
    spaces = theirs.convert_tokens_to_ids(["\u2581", "\u2581\u2581", "\u2581"])
    assert mine.decode(spaces) == theirs.decode(spaces) == "   "
    assert mine.decode([1, *ids, 2]) == theirs.decode([1, *ids, 2], skip_special_tokens=True) == "Hello new world"


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_sentence_piece_decodes_as_hugging_face(data, sentence_piece):
    """Words, spaces, special tokens and whole characters written as bytes."""
    mine, theirs = sentence_piece
    words = st.sampled_from(["\u2581", "\u2581Hello", "\u2581new", "\u2581\u2581", "!", "é", "<s>", "</s>"])
    in_bytes = st.characters(codec="utf-8").map(lambda c: [f"<0x{b:02X}>" for b in c.encode()])
    pieces = data.draw(st.lists(st.one_of(words.map(lambda w: [w]), in_bytes), max_size=12))
    ids = theirs.convert_tokens_to_ids([token for piece in pieces for token in piece])
    assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert mine.decode(ids, skip_special=False) == theirs.decode(ids)


def test_threads_may_share_it(byte_level):
    mine, _ = byte_level
    text, results = "Once upon a time " * 50, []

    def work() -> None:
        for _ in range(20):
            results.append(mine.encode(text))
            mine.encode_chat([{"role": "user", "content": text}])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(ids == results[0] for ids in results)


NAMED = ("Qwen2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "NotThere", None)


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_the_class_is_the_one_that_hugging_face_takes(name, named, tiny, tmp_path):
    """Whatever the folder says of it, with what little of the model's config we hand on."""
    for path in tiny(name).glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    keys = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8")) | {"tokenizer_class": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(keys), encoding="utf-8")
    mine, theirs = Tokenizer(tmp_path)._hf, AutoTokenizer.from_pretrained(tmp_path)
    assert type(mine) is type(theirs)
    assert mine.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert (plain_config(tmp_path) is None) == (named is None)


def test_code_from_a_folder_is_not_run_and_nobody_is_asked(tiny, tmp_path, monkeypatch):
    for path in tiny("llama").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    keys = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(keys), encoding="utf-8")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    with pytest.raises(ValueError, match="the tokenizer in .* cannot be read: .*custom code"):
        Tokenizer(tmp_path)
    assert asked == []


def test_a_folder_without_tokenizer_json(tmp_path, tiny):
    (tmp_path / "config.json").write_bytes((tiny("qwen2") / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file(name, tmp_path, tiny):
    """The error says which folder it is about, whatever the libraries below raise."""
    for path in tiny("qwen2").glob("*.json*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match="the tokenizer in .* cannot be read: ") as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_conversation_is_one(byte_level):
    """Of two conversations the library would make a list, and we its text."""
    mine, _ = byte_level
    for messages in ([[{"role": "user", "content": "Hi"}]], ["Hi"]):
        with pytest.raises(ValueError, match="template takes messages like .*, not .*Hi"):
            mine.encode_chat(messages)
