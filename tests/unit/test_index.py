"""Weight files are verified before any parameter is touched (bug bank 37 and 38)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.errors import UserError
from shardwise.models.read import read_facts
from shardwise.weights.index import HEAD, INDEX_FILE, open_index, verify
from tests.models import save_model


def check(folder: Path) -> tuple[str, ...]:
    facts = read_facts(folder)
    return verify(open_index(folder), facts)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_model("LL", tmp_path / "LL", max_shard_size="200KB")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return save_model("LL", tmp_path / "LL")


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_whole_directories_pass(sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert check(sharded) == ()
    stored = sum(t.nbytes for f in sharded.glob("*.safetensors") for t in load_file(f).values())
    assert open_index(sharded).num_bytes == stored


def test_a_missing_file_names_the_file_and_what_it_held(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    key = next(iter(load_file(victim)))
    victim.unlink()
    with pytest.raises(UserError) as caught:
        check(sharded)
    assert victim.name in str(caught.value)
    held = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    assert held[key] == victim.name


@pytest.mark.parametrize("bytes_left", [0, 5, 9, -1024])
def test_a_short_file_is_named_with_both_sizes(sharded: Path, bytes_left: int) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:bytes_left])
    with pytest.raises(UserError, match=victim.name):
        check(sharded)


def test_a_file_that_is_too_long_is_refused(single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(UserError, match="its header says"):
        check(single)


def test_a_missing_tensor_is_named(single: Path) -> None:
    edit(single, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"lack model\.norm\.weight"):
        check(single)


def test_an_unknown_tensor_is_a_warning(single: Path) -> None:
    edit(single, lambda tensors: tensors.update({"extra.weight": torch.zeros(3)}))
    (warning,) = check(single)
    assert "extra.weight" in warning


def test_a_renamed_prefix_is_refused_naming_both_sides(single: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors["transformer." + key.removeprefix("model.")] = tensors.pop(key)

    edit(single, rename)
    with pytest.raises(UserError, match=r"lack .*unknown tensors instead: transformer\."):
        check(single)


def test_a_transposed_tensor_is_refused_with_both_shapes(single: Path) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    edit(single, lambda tensors: tensors.update({key: tensors[key].T.contiguous()}))
    with pytest.raises(UserError) as caught:
        check(single)
    assert all(word in str(caught.value) for word in (key, "[64, 128]", "[128, 64]"))


def test_an_integer_tensor_is_refused(single: Path) -> None:
    key = "model.norm.weight"
    edit(single, lambda tensors: tensors.update({key: torch.zeros(64, dtype=torch.int64)}))
    with pytest.raises(UserError, match="I64"):
        check(single)


def test_pickles_are_never_loaded(single: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    (single / "model.safetensors").unlink()
    torch.save(tensors, single / "pytorch_model.bin")
    with pytest.raises(UserError, match="convert them"):
        check(single)


def test_sharded_pickles_are_never_loaded(single: Path) -> None:
    (single / "model.safetensors").unlink()
    for part in range(1, 4):
        torch.save({}, single / f"pytorch_model-{part:05d}-of-00003.bin")
    (single / "pytorch_model.bin.index.json").write_text("{}")
    with pytest.raises(UserError, match="pytorch_model-00001-of-00003"):
        check(single)


def test_an_empty_directory_has_nothing_to_load(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no \*\.safetensors"):
        check(single)


def test_safetensors_win_over_pickles_and_say_so(single: Path) -> None:
    torch.save({}, single / "pytorch_model.bin")
    (note,) = check(single)
    assert "pytorch_model.bin: ignored" in note


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_a_tied_model_that_stores_its_head_too(tmp_path: Path, shift: float) -> None:
    """Equal or different: the user is told which one counts."""
    folder = save_model("Q3", tmp_path / "Q3")

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors["model.embed_tokens.weight"].clone() + shift

    edit(folder, add_head)
    (warning,) = check(folder)
    assert ("DIFFERENT" in warning) == bool(shift)
    assert "model.embed_tokens.weight is used" in warning
    assert "is not" in warning


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    with pytest.raises(UserError, match=INDEX_FILE):
        check(sharded)


def test_an_index_that_promises_too_much(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"]["ghost.weight"] = next(iter(index["weight_map"].values()))
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"ghost\.weight"):
        check(sharded)
