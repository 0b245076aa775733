"""adapter_config.json: what is read, what is refused; which matrices can have an adapter."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import Layout, Lora, Plan, Precision, Train
from shardwise.errors import UserError
from shardwise.models.adapters import complete, write_adapters
from shardwise.models.facts import ModelFacts
from shardwise.models.read import facts_of_config, facts_of_plan, read_facts
from shardwise.planner.layout import check_plan, why_illegal
from shardwise.planner.memory import predict_memory, state_bytes
from tests.models import model_config
from tests.unit.test_facts import LLAMA_3_1_8B

HEADS = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def facts(name: str) -> ModelFacts:
    return facts_of_config(model_config(name).to_dict(), source=name)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("LL", [*HEADS, *MLP]),
        ("G3", [*HEADS, *MLP]),
        ("PHI", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("MOED", HEADS),
        ("DS", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
    ],
)
def test_all_matrices_of_a_layer(name: str, targets: list[str]) -> None:
    """Of a mixture those of attention, also in its layers without experts."""
    assert complete(Lora(), facts(name)).targets == targets


def test_what_has_no_matrix() -> None:
    with pytest.raises(UserError, match=r"gpt2 has no matrix that .* use task=full"):
        complete(Lora(), facts("GPT2"))
    with pytest.raises(UserError, match=r"'gate' is no matrix of llama .* q_proj, .*down_proj"):
        complete(Lora(targets=["q_proj", "gate"]), facts("LL"))


def save(folder: Path, **changes: Any) -> Path:
    """A directory of adapters of a llama without weights."""
    base = folder / "base"
    base.mkdir()
    config = {**model_config("LL").to_dict(), "dtype": "float32"}
    (base / "config.json").write_text(json.dumps(config))
    write_adapters(folder, Lora(rank=8, alpha=4.0, targets=["q_proj", "up_proj"]), base)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    lora = read_facts(save(tmp_path)).adapters
    assert lora == Lora(rank=8, alpha=4.0, targets=["q_proj", "up_proj"])
    assert lora is not None
    assert lora.scale == 0.5


def test_full_names_are_read_as_their_last_parts(tmp_path: Path) -> None:
    names = [
        f"model.layers.{n}.self_attn.{name}" for n in range(4) for name in ("v_proj", "q_proj")
    ]
    lora = read_facts(save(tmp_path, target_modules=names)).adapters
    assert lora is not None
    assert lora.targets == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora=True is not built"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"bias": "all"}, "bias='all' is not built; bias='none' is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not built"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
        ({"layers_to_transform": 0}, "layers_to_transform=0"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"a_setting_of_tomorrow": 3}, "a_setting_of_tomorrow=3 is not built"),
        ({"revision": "v2"}, "revision"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not built; LORA is"),
        ({"target_modules": ".*q_proj"}, "a list of names is expected"),
        ({"target_modules": ["lm_head"]}, "'lm_head' is no matrix of llama"),
        ({"r": "8"}, ": r = '8'"),
        ({"lora_alpha": -1}, ": lora_alpha = -1"),
        ({"target_modules": []}, "a list of names is expected"),
        ({"base_model_name_or_path": "elsewhere"}, "'elsewhere', which is not there"),
        ({"base_model_name_or_path": None}, "which is not there"),
    ],
    ids=str,
)
def test_what_is_more_than_plain_adapters_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read_facts(save(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_what_the_file_leaves_out_is_as_peft_has_it(tmp_path: Path) -> None:
    """r and lora_alpha are 8; a base is looked for from where the command is run, too."""
    save(tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    for key in ("r", "lora_alpha"):
        del config[key]
    file.write_text(json.dumps(config))
    lora = read_facts(tmp_path).adapters
    assert lora is not None
    assert (lora.rank, lora.alpha) == (8, 8.0)


def test_a_relative_model_is_looked_for_from_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, base_model_name_or_path="there/base")
    (tmp_path / "there").mkdir()
    (tmp_path / "base").rename(tmp_path / "there" / "base")
    assert read_facts(tmp_path).adapters is not None  # beside the adapters
    (tmp_path / "there").rename(tmp_path.parent / "there")
    monkeypatch.chdir(tmp_path.parent)
    assert read_facts(tmp_path).adapters is not None


def test_adapters_that_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which holds adapters itself"):
        read_facts(save(tmp_path, base_model_name_or_path="."))


def test_only_what_the_plan_says_is_compared(tmp_path: Path) -> None:
    """The other settings are the directory's."""
    model = str(save(tmp_path))
    lora = Lora(rank=8)  # says nothing of alpha
    plan = Plan(model=model, task="lora", layout=Layout(), lora=lora)
    assert facts_of_plan(plan).adapters == Lora(rank=8, alpha=4.0, targets=["q_proj", "up_proj"])


def test_adapters_of_adapters(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "more").mkdir()
    write_adapters(tmp_path / "more", Lora(targets=["q_proj"]), tmp_path)
    with pytest.raises(UserError, match="which holds adapters itself"):
        read_facts(tmp_path / "more")


@pytest.mark.parametrize(
    ("task", "lora", "on_adapters", "words"),
    [
        ("full", Lora(), False, "task=full trains no adapters"),
        ("full", None, True, "shardwise export --merge"),
        ("serve", Lora(), False, "holds no adapters"),
        ("lora", Lora(rank=16), True, r"lora.rank=16, but the adapters in .* have 8"),
    ],
)
def test_a_plan_and_a_directory_that_do_not_fit(
    tmp_path: Path, task: Any, lora: Lora | None, on_adapters: bool, words: str
) -> None:
    model = str(save(tmp_path) if on_adapters else save(tmp_path) / "base")
    with pytest.raises(UserError, match=words):
        facts_of_plan(Plan(model=model, task=task, layout=Layout(), lora=lora))


def test_a_model_of_8b_needs_2_bytes_a_frozen_parameter(tmp_path: Path) -> None:
    """bf16 weights, and 16 bytes of each parameter of the adapters (rank 16, all matrices)."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_1_8B, "dtype": "bfloat16"}))
    bf16 = Precision(compute="bf16")
    plan = Plan(model=str(tmp_path), task="lora", layout=Layout(), precision=bf16)
    found = facts_of_plan(plan)
    assert found.num_trained_parameters == 41_943_040  # as PEFT prints it for r=16
    assert state_bytes(plan, found) == 2 * 8_030_261_248 + 16 * 41_943_040
    memory = predict_memory(plan, found)
    assert memory.weights == 2 * 8_030_261_248 + 4 * 41_943_040
    assert memory.optimizer == 8 * 41_943_040
    sharded = plan.model_copy(update={"layout": Layout(fsdp=8)})
    assert predict_memory(sharded, found).weights == pytest.approx(memory.weights / 8, rel=1e-6)


def rounded(name: str) -> ModelFacts:
    plain = facts(name)
    return replace(plain, adapters=complete(Lora(quantize="nf4"), plain))


def test_a_model_of_8b_in_four_bits(tmp_path: Path) -> None:
    """4.5 bits of each matrix in a layer, scales included; embedding, head and norms in bf16."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_1_8B, "dtype": "bfloat16"}))
    bf16 = Precision(compute="bf16")
    plan = Plan(model=str(tmp_path), task="qlora", layout=Layout(), precision=bf16)
    found = facts_of_plan(plan)
    outside = 2 * 128256 * 4096 + (2 * 32 + 1) * 4096
    assert found.num_packed_parameters == 8_030_261_248 - outside
    frozen = 2 * outside + (8_030_261_248 - outside) * 9 // 16
    assert state_bytes(plan, found) == frozen + 16 * 41_943_040
    assert predict_memory(plan, found).weights == frozen + 4 * 41_943_040
    sharded = predict_memory(plan.model_copy(update={"layout": Layout(fsdp=8)}), found)
    assert sharded.weights == pytest.approx((frozen + 4 * 41_943_040) / 8, rel=1e-6)
    split = predict_memory(plan.model_copy(update={"layout": Layout(tp=8)}), found)
    assert sharded.weights < split.weights < 1.1 * sharded.weights  # some of the adapters are whole
    served = plan.model_copy(update={"task": "serve"})
    assert predict_memory(served, found).weights == frozen + 2 * 41_943_040


def test_how_the_matrices_were_rounded_is_beside_the_adapters(tmp_path: Path) -> None:
    save(tmp_path)
    base, lora = tmp_path / "base", Lora(rank=8, targets=["q_proj"], quantize="nf4")
    write_adapters(tmp_path, lora, base)
    assert json.loads((tmp_path / "adapter_config.json").read_text()).get("quantize") is None
    assert read_facts(tmp_path).adapters == lora
    for content in (
        {"format": "nf4", "block_size": 128},
        {"format": "int8", "block_size": 64},
        {"format": None, "block_size": 64},
        {"format": "nf4"},
        {"a": 1},
    ):
        (tmp_path / "base_quantization.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=r"is not built; nf4 in blocks of 64 is"):
            read_facts(tmp_path)


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("LLW", Layout(tp=4), None),
        ("PHIW", Layout(tp=4), None),
        ("LL", Layout(), None),
        ("LL", Layout(tp=2), r"1 blocks of 64 inputs of o_proj; tp sizes that work: 1\b"),
        ("MOE0", Layout(), r"task=qlora is not proved for qwen3_moe"),
        ("DS", Layout(), r"task=qlora is not proved for deepseek_v3"),
    ],
    ids=str,
)
def test_where_rounded_matrices_can_be_cut(name: str, layout: Layout, words: str | None) -> None:
    """Between their blocks; mixtures of experts would keep most of what they are as it is."""
    if words and "not proved" in words:
        found = replace(facts(name), adapters=Lora(targets=["o_proj"], quantize="nf4"))
    else:
        found = rounded(name)
    reason = why_illegal(layout, found, task="lora")
    assert reason is None if words is None else re.search(words, str(reason)), reason


def test_compiled_layers_would_keep_what_they_unpack() -> None:
    train = Train(compile=True)
    plan = Plan(model="x", task="qlora", layout=Layout(), train=train)
    with pytest.raises(UserError, match=r"train.compile=true .* set train.compile=false"):
        check_plan(plan, rounded("LLW"))


def test_what_cannot_be_rounded() -> None:
    with pytest.raises(UserError, match=r"blocks of 64 inputs, and q_proj of this model has 72"):
        rounded("ODD")
    with pytest.raises(UserError, match=r"gpt2 has no matrix"):
        rounded("GPT2")
