"""`shardwise inspect`: what a path is, what it lacks, and no weights read for it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwise import console
from shardwise.config import Devices, Layout, Lora, Memory, Plan, Prediction, Train
from shardwise.errors import UserError
from shardwise.launch.found import Found, render
from shardwise.launch.inspect import look_at
from shardwise.models.adapters import write_adapters
from shardwise.models.facts import ModelFacts
from shardwise.models.read import facts_of_config, read_facts
from shardwise.trainer.state import RowOrder, State
from tests.e2e.shell import shardwise
from tests.models import save_adapters, save_model
from tests.unit import test_gguf

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
UP = "model.layers.1.mlp.up_proj.weight"


def write_file(file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A safetensors file of zeros, written by hand."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, size = end, 2 if dtype == "BF16" else 4
        for length in shape:
            size *= length
        end += size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def write_model(folder: Path, num_files: int = 3, **changes: Any) -> Path:
    """A llama of zeros in so many files, with their index."""
    config = {**CONFIG, **changes}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = list(facts_of_config(config, source="test").stored_shapes.items())
    weight_map = {}
    for number in range(num_files):
        file = folder / f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(shapes[number::num_files])
        write_file(file, part)
        weight_map |= dict.fromkeys(part, file.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_single(folder: Path, without: str = "", **changed: tuple[int, ...]) -> Path:
    """The same in one file, without a tensor or with other shapes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {**facts_of(CONFIG).stored_shapes, **changed}
    shapes.pop(without, None)
    write_file(folder / "model.safetensors", shapes)
    return folder


def facts_of(config: Mapping[str, Any]) -> ModelFacts:
    return facts_of_config(config, source="test")


def write_checkpoint(
    run: Path, step: int = 24, plan: Plan | None = None, base: str | None = None
) -> Path:
    """A checkpoint of a full fine-tuning, as two ranks leave it."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    write_single(folder / "model")
    for rank in (1, 2):
        write_file(folder / "optimizer" / f"shard-{rank:05d}.safetensors", {"exp_avg/x": (64,)})
    (plan or a_plan()).save(folder / "plan.yaml")
    sizes = {
        str(file.relative_to(folder)): file.stat().st_size
        for file in folder.rglob("*")
        if file.is_file()
    }
    order = RowOrder(num_rows=80, global_batch=4, seed=0, data_digest="0123456789abcdef" * 4)
    state = State(step=step, row_order=order, loss=1.25, files=sizes, base=base)
    (folder / "state.json").write_text(state.model_dump_json())
    return folder


def a_plan(model: str = "my-model", **train: Any) -> Plan:
    layout = Layout(fsdp=2, tp=2)
    settings = Train(global_batch=4, epochs=2, **train)
    return Plan(model=model, task="full", layout=layout, train=settings)


def write_run(run: Path, *steps: int, plan: Plan | None = None) -> Path:
    for step in steps:
        write_checkpoint(run, step, plan)
    (run / "work").mkdir(parents=True)
    (run / "work" / "lock").write_text("")
    (plan or a_plan()).save(run / "plan.yaml")
    lines = [
        json.dumps({"step": n + 1, "loss": 2.0 - n / 100}) for n in range(max(steps, default=3))
    ]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 9']))
    return run


def page(found: Found) -> str:
    with console.out.capture() as caught:
        console.out.print(render(found))
    return caught.get()


# --- models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_whole_model(tmp_path: Path, num_files: int) -> None:
    folder = write_model(tmp_path / "model", num_files)
    found = look_at(folder)
    facts = read_facts(folder)
    assert (found.kind, found.problems, found.notes) == ("model", (), ())
    assert found.fields["family"] == "llama"
    assert found.fields["parameters"] == facts.num_parameters
    assert found.fields["dtypes"] == ["bf16"]
    assert found.fields["files"] == num_files
    assert found.fields["bytes"] == 2 * facts.num_parameters
    assert (found.fields["tied"], found.fields["runs"]) == (False, True)
    text = page(found)
    assert "a Hugging Face model, whole" in text
    assert "Shardwise runs it  yes" in text


@pytest.mark.parametrize("name", ["MOE", "PHI", "ODD"])
def test_models_that_transformers_has_saved(tmp_path: Path, name: str) -> None:
    """Experts apart and stacked, fused matrices, a tied head: the names are the model's own."""
    found = look_at(save_model(name, tmp_path / name))
    assert found.problems == found.notes == ()
    assert found.fields["dtypes"] == ["fp32"]
    assert found.fields["bytes"] == 4 * found.fields["parameters"]
    active, num_parameters = found.fields["active_parameters"], found.fields["parameters"]
    assert 0 < active < num_parameters if name == "MOE" else active is None
    assert found.fields["tied"] == (name == "ODD")


def test_missing_and_cut_files_are_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", 4)
    first, second, third, _ = sorted(folder.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-6])
    third.write_bytes(third.read_bytes()[:5])
    found = look_at(folder)
    missing, cut, no_header = found.problems  # and not what they held, once more
    assert missing.startswith("model.safetensors.index.json names")
    assert first.name in missing
    assert cut.startswith(f"{second.name} has")
    assert no_header.startswith(f"{third.name} is not a whole safetensors file")
    assert found.fields["files"] == 1
    assert "NOT whole" in page(found)
    assert "Shardwise runs it  yes, once it is whole" in page(found)


def test_missing_keys_and_every_wrong_shape(tmp_path: Path) -> None:
    wrong = {UP: (8, 16), "model.layers.0.mlp.up_proj.weight": (8, 16)}
    folder = write_single(tmp_path / "model", without="model.norm.weight", **wrong)
    lacks, *others = look_at(folder).problems
    assert lacks == "the weights lack model.norm.weight."
    assert len(others) == 2
    assert "[8, 16] in model.safetensors; the config asks for [16, 8]" in others[0]


def test_a_key_that_the_index_lists_and_no_file_holds(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00003.safetensors"
    file.write_text(json.dumps(index))
    (problem,) = look_at(folder).problems
    assert "lists model.extra, but no file holds it" in problem


def test_an_expert_with_another_number_of_dimensions(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model("MOE", tmp_path / "MOE")
    file, key = folder / "model.safetensors", "model.layers.0.mlp.experts.0.down_proj.weight"
    tensors = load_file(file)
    tensors[key] = tensors[key][None, None].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    (problem,) = look_at(folder).problems
    assert problem.startswith(f"{key} has the shape [1, 1, ")


def test_an_unknown_key_is_a_note(tmp_path: Path) -> None:
    found = look_at(write_single(tmp_path / "model", strange=(3,)))
    assert found.problems == ()
    assert found.notes == ("tensors that the model does not use: strange",)
    assert "note: tensors that the model does not use" in page(found)


def test_a_model_without_weights_or_without_a_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", 2)
    (folder / "config.json").rename(tmp_path / "config.json")
    assert look_at(folder).problems == ("config.json is missing",)
    (folder / "config.json").write_text("{")
    (problem,) = look_at(folder).problems
    assert "config.json as JSON" in problem
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (tmp_path / "config.json").rename(folder / "config.json")
    (problem,) = look_at(folder).problems
    assert "holds no *.safetensors file" in problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, "cannot be planned"),
        ({"model_type": "glm4", "head_dim": 4}, "does not run glm4 yet"),
        ({"quantization_config": {"quant_method": "awq"}}, "the model is quantised (awq)"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not proved"),
    ],
)
def test_why_it_is_not_run(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Such a model is as whole as its files are."""
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    found = look_at(folder)
    assert found.problems == ()
    assert found.fields["runs"] is False
    assert words in found.fields["why_not"]
    assert found.fields["stored_values"] == facts_of(CONFIG).num_parameters
    assert "not compared" in found.notes[-1]


def test_a_config_of_a_known_family_that_says_nonsense_is_a_problem(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": "wide"}))
    (problem,) = look_at(folder).problems
    assert "hidden_size" in problem


def test_four_hundred_files_in_a_second(tmp_path: Path) -> None:
    """Headers are read once and no weights; the bound is wide, machines are shared."""
    folder = write_model(tmp_path / "model", 400, num_hidden_layers=60)
    began, worked = time.perf_counter(), time.process_time()
    found = look_at(folder)
    assert time.process_time() - worked < 1.0
    assert time.perf_counter() - began < 3.0
    assert found.problems == ()
    assert found.fields["files"] == 400


# --- adapters -------------------------------------------------------------------------------


def test_adapters_and_their_model(tmp_path: Path) -> None:
    base = save_model("LL", tmp_path / "base")
    folder = save_adapters(base, tmp_path / "adapters")
    found = look_at(folder)
    assert (found.kind, found.problems) == ("adapters", ())
    fields = found.fields
    assert (fields["rank"], fields["alpha"], fields["quantize"]) == (4, 12.0, None)
    assert "q_proj" in fields["targets"]
    assert (fields["model"], fields["model_is_there"]) == (str(base), True)
    assert fields["trained_parameters"] == read_facts(folder).num_trained_parameters
    assert fields["bytes"] == 4 * fields["trained_parameters"]  # the model's are not among them
    (folder / "base_quantization.json").write_text('{"format": "nf4", "block_size": 64}')
    assert look_at(folder).fields["quantize"] == "nf4"
    (base / "model.safetensors").write_bytes(b"")
    (problem,) = look_at(folder).problems
    assert str(base) in problem


def test_adapters_whose_model_is_gone(tmp_path: Path) -> None:
    base = save_model("LL", tmp_path / "base")
    folder = save_adapters(base, tmp_path / "adapters")
    trained = look_at(folder).fields["trained_parameters"]
    shutil.rmtree(base)
    found = look_at(folder)
    (problem,) = found.problems
    assert "which is not there" in problem
    assert (found.fields["model_is_there"], found.fields["runs"]) == (False, False)
    assert found.fields["trained_parameters"] == trained
    assert found.fields["rank"] == 4


def test_adapters_that_are_not_plain(tmp_path: Path) -> None:
    folder = write_single(tmp_path / "model")
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    write_adapters(adapters, Lora(rank=2, targets=["q_proj"]), folder)
    write_file(adapters / "adapter_model.safetensors", {"x": (2,)})
    file = adapters / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_dora": True}))
    found = look_at(adapters)
    assert found.problems == ()
    assert "use_dora" in found.fields["why_not"]
    file.unlink()
    assert look_at(adapters).problems == ("adapter_config.json is missing",)


# --- checkpoints and runs -------------------------------------------------------------------


def test_a_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "run", base="fedcba9876543210" * 4)
    assert look_at(folder).problems == ("model/adapter_config.json is missing",)
    (folder / "model" / "adapter_config.json").write_text("{}")
    found = look_at(folder)
    assert (found.kind, found.problems) == ("checkpoint", ())
    fields = found.fields
    assert (fields["step"], fields["loss"], fields["task"]) == (24, 1.25, "full")
    assert fields["layout"] == "fsdp=2 x tp=2 (ZeRO-3)"
    assert fields["rows_digest"] == "0123456789ab"
    assert fields["base"] == "fedcba987654"
    assert fields["model_bytes"] > 2 * facts_of(CONFIG).num_parameters
    assert 2 * 128 < fields["optimizer_bytes"] < 2 * 1024
    assert "a checkpoint, complete" in page(found)


def test_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "run")
    shard = folder / "optimizer" / "shard-00002.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(b"x")
    (folder / "model" / "model.safetensors").unlink()
    (folder / "plan.yaml").unlink()
    assert sorted(look_at(folder).problems) == [
        "model/model.safetensors is missing",
        f"optimizer/shard-00002.safetensors has 1 bytes, not {size}",
        "plan.yaml is missing",
    ]
    (folder / "state.json").unlink()
    found = look_at(folder)
    assert "state.json" in found.problems[0]
    assert "step" not in found.fields
    assert "NOT complete" in page(found)


def test_a_state_that_lists_no_files_is_no_complete_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    order = RowOrder(num_rows=8, global_batch=4, seed=0, data_digest="0")
    (folder / "state.json").write_text(State(step=1, row_order=order, loss=1.0).model_dump_json())
    a_plan().save(folder / "plan.yaml")
    assert "holds no weights" in look_at(folder).problems[0]


def test_the_model_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "run")
    found = look_at(folder / "model")
    assert (found.kind, found.problems) == ("model", ())
    assert found.fields["checkpoint"] == {"name": folder.name, "complete": True, "why_not": None}
    (folder / "optimizer" / "shard-00001.safetensors").unlink()
    found = look_at(folder / "model")
    assert found.problems == ()  # the model is whole
    assert "step-000024  NOT complete: " in page(found)
    monkeypatch.chdir(folder / "model")
    assert look_at(Path()).fields["checkpoint"]["name"] == folder.name
    monkeypatch.chdir(folder)
    assert look_at(Path()).kind == "checkpoint"
    with pytest.raises(UserError, match="nothing that Shardwise knows"):
        look_at(folder / "optimizer")


def test_a_run(tmp_path: Path) -> None:
    found = look_at(write_run(tmp_path / "run", 12, 24))
    assert (found.kind, found.problems, found.notes) == ("run", (), ())
    fields = found.fields
    assert (fields["task"], fields["layout"]) == ("full", "fsdp=2 x tp=2 (ZeRO-3)")
    assert fields["steps"] == {"done": 24, "of": 40}  # 80 rows, 4 a step, twice
    assert fields["loss"] == pytest.approx(1.77)
    assert [one["name"] for one in fields["checkpoints"]] == ["step-000012", "step-000024"]
    assert fields["newest"] == "step-000024"
    assert "steps        24 of 40" in page(found)


@pytest.mark.parametrize(("measured", "of"), [(30, 30), (12, None), (None, None)])
def test_steps_of_a_run_with_packed_rows(tmp_path: Path, measured: int | None, of: int) -> None:
    """Only a finished run tells how many, and not the one before it was trained on."""
    run = write_run(tmp_path / "run", 24, plan=a_plan(packing=True))
    if measured is not None:
        known = {"peak_bytes": [1], "step_s": 1.0, "tokens_per_s": 1.0, "train_loss": 1.0}
        evals = {"eval_loss_before": None, "eval_loss_after": None}
        (run / "measured.json").write_text(json.dumps({**known, **evals, "steps": measured}))
    assert look_at(run).fields["steps"] == {"done": 24, "of": of}


def test_leftovers_of_a_run_are_mentioned(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 12)
    partial = run / "checkpoints" / ".step-000013.partial"
    (partial / "model").mkdir(parents=True)
    found = look_at(run)
    assert found.problems == ()
    assert found.fields["leftovers"] == [partial.name]
    assert partial.name in found.notes[0]
    assert look_at(partial).problems  # which is none by itself


def test_what_a_run_lacks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 6, 12)
    (run / "checkpoints" / "step-000012" / "state.json").unlink()
    found = look_at(run)
    (problem,) = found.problems
    assert "step-000012" in problem
    assert found.fields["newest"] == "step-000006"
    assert "step-000012  NOT complete" in page(found)
    shutil.rmtree(run / "checkpoints")
    found = look_at(run)
    assert found.problems == ("there is no complete checkpoint",)
    assert found.fields["steps"] == {"done": 12, "of": None}
    (run / "plan.yaml").write_text("task: [")
    assert "is not YAML" in look_at(run).problems[0]


# --- plans, sizes, anything else ------------------------------------------------------------


def test_a_plan(tmp_path: Path) -> None:
    model = write_model(tmp_path / "my-model")
    parts = dict.fromkeys(Memory.model_fields, 2**30)
    plan = a_plan(str(model)).model_copy(
        update={
            "predicted": Prediction(memory=Memory(**parts), memory_evidence="none"),
            "devices": Devices(kind="cpu", memory_gib=16.0),
            "lora": Lora(quantize="nf4"),
            "task": "lora",
        }
    )
    plan.save(tmp_path / "my-plan.yaml")
    found = look_at(tmp_path / "my-plan.yaml")
    assert (found.kind, found.problems) == ("plan", ())
    fields = found.fields
    assert (fields["task"], fields["method"]) == ("lora", "qlora")
    assert (fields["model"], fields["model_is_there"]) == (str(model), True)
    assert fields["devices"] == {"kind": "cpu", "count": 4, "memory_gib": 16.0}
    assert fields["predicted_bytes"] == 9 * 2**30
    text = page(found)
    assert "4 x cpu, 16.00 GiB each" in text
    assert "memory a device  9.00 GiB" in text
    a_plan("nobody/nothing").save(tmp_path / "other.yml")
    found = look_at(tmp_path / "other.yml")
    assert found.fields["model_is_there"] is False
    assert "hf download" in found.notes[0]


def test_a_config_and_a_gguf_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    found = look_at(folder / "config.json")
    assert (found.kind, found.problems) == ("config", ())
    assert found.fields["parameters"] == facts_of(CONFIG).num_parameters
    assert "planned from sizes only" in found.notes[0]
    facts = test_gguf.facts_of("LL")
    found = look_at(test_gguf.write(tmp_path / "LL.gguf", facts, "llama"))
    assert (found.kind, found.fields["family"]) == ("gguf", "llama")
    assert found.fields["parameters"] == facts.num_parameters
    assert "planned from sizes only" in found.notes[0]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty/", "", "nothing that Shardwise knows; expected a directory"),
        ("nowhere", None, "no file or directory"),
        ("text.txt", "hello", "nothing that Shardwise knows"),
        ("empty.json", "", "cannot read"),
        ("list.json", "[]", "no JSON object"),
        ("tokenizer.json", "{}", "nothing that Shardwise knows"),
        ("plan.yaml", "task: [", "is not YAML"),
        ("other.yaml", "services: {}", "the key 'model' is missing"),
        ("x.gguf", "GGUFnonsense", "GGUF"),
        ("checkpoints/", "", "nothing that Shardwise knows"),
    ],
)
def test_anything_else_is_one_line(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        look_at(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["pipe", "plan.yaml", "config.json", "x.gguf"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="nothing that Shardwise knows"):
        look_at(tmp_path / name)


def test_json_is_plain_data(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 12)
    shown = look_at(run).to_json()
    assert json.loads(json.dumps(shown)) == shown
    assert (shown["path"], shown["kind"], shown["whole"]) == (str(run), "run", True)
    assert shown["problems"] == shown["notes"] == []


def test_a_long_list_is_cut_on_the_page_only(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for step in range(1, 31):
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    found = look_at(run)
    assert len(found.to_json()["problems"]) == 31
    text = page(found)
    assert text.count("step-000030  NOT complete") == 1
    assert "step-000001  NOT complete" not in text
    assert "and 10 more" in text
    assert "and 11 more" in text


def test_no_torch_is_imported(tmp_path: Path) -> None:
    """Whatever the path is."""
    model = write_single(tmp_path / "model")
    (tmp_path / "adapters").mkdir()
    write_adapters(tmp_path / "adapters", Lora(targets=["q_proj"]), model)
    run = write_run(tmp_path / "run", 12)
    paths = [model, tmp_path / "adapters", run, run / "checkpoints/step-000012", run / "plan.yaml"]
    code = (
        "import sys; from pathlib import Path; from shardwise.launch.found import render; "
        "from shardwise.launch.inspect import look_at; "
        "[render(look_at(Path(path))) for path in sys.argv[1:]]; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, *paths], check=False).returncode == 0


def test_the_command_and_its_exit_codes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    done = shardwise(tmp_path, "inspect", folder, "--json")
    assert done.code == 0, done.text
    assert json.loads(done.out)["whole"] is True
    next(folder.glob("*.safetensors")).unlink()
    done = shardwise(tmp_path, "inspect", folder)
    assert done.code == 1, done.text
    assert "which is not there" in done.out
    assert done.err == ""
    done = shardwise(tmp_path, "inspect", tmp_path / "tmp")
    assert done.code == 2, done.text
    assert len(done.err.splitlines()) == 1
