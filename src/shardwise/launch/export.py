"""Export a checkpoint and, if asked, prove that it is the same model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from shardwise import console
from shardwise.config import PLAN_FILE, Layout, Plan, load_plan
from shardwise.errors import ShardwiseError, UserError
from shardwise.launch.gguf import open_source
from shardwise.launch.start import start_check
from shardwise.models.adapters import ADAPTER_CONFIG
from shardwise.models.gguf import is_gguf
from shardwise.models.hub import CONFIG_FILE
from shardwise.models.read import base_of, read_facts
from shardwise.weights.index import fingerprint, verify
from shardwise.weights.names import open_model_index

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def start_export(
    source: Path, out: Path, dtype: str | None, *, merge: bool = False, check: bool
) -> None:
    """Write `source` as a Hugging Face directory, or its adapters as PEFT reads them.

    Args:
        dtype: None: that of the model; of adapters fp32.
        merge: write the whole model, with the adapters merged into it.

    Raises:
        UserError: nothing to export there, the target exists, or the dtype is unknown.
        ShardwiseError: the check found a difference.
    """
    from shardwise.weights.check import TOLERANCE
    from shardwise.weights.save import DTYPES, export_adapters, export_model, rounding_error

    if source.is_file() and is_gguf(source):
        _export_gguf(source, out, "bf16" if dtype is None else dtype, merge=merge, check=check)
        return
    directory, plan = find_model(source)
    facts = read_facts(directory)
    if merge and facts.adapters is None:
        raise UserError(f"{directory} holds no adapters, so there is nothing to --merge.")
    alone = facts.adapters is not None and not merge
    name = ("fp32" if alone else _SHORT[facts.dtype]) if dtype is None else dtype
    if name not in DTYPES:
        raise UserError(f"--dtype {name!r} is not one of {', '.join(DTYPES)}.")
    index = open_model_index(directory, facts)
    for warning in verify(index, facts):
        console.out.print(f"note: {warning}")
    count = facts.num_trained_parameters if alone else facts.num_parameters
    what = "parameters of adapters" if alone else "parameters"
    console.out.print(f"writing {count / 1e6:.1f} M {what} to {out} ...")
    write = export_adapters if alone else export_model
    num_bytes = write(index, facts, out, DTYPES[name])
    console.out.print(f"exported {directory}: {console.gib(num_bytes)}, {name}")
    if facts.adapters is not None and facts.adapters.quantize is not None:
        console.out.print(_on_rounded(facts.adapters.quantize, rounding_error(index, facts), alone))
    if not check:
        return
    difference, largest = start_check(plan, directory, out, name)
    words = f"logits differ by at most {difference:.1e} (largest logit {largest:.1f})"
    if not difference <= TOLERANCE * largest:
        raise ShardwiseError(f"{out} is NOT the model that was exported: {words}.")
    console.out.print(f"equal: {words}", style="green")


def _export_gguf(source: Path, out: Path, dtype: str, *, merge: bool, check: bool) -> None:
    from shardwise.weights.save import DTYPES, export_model

    if merge or check:
        raise UserError(f"--{'merge' if merge else 'check'} is not for GGUF files; leave it out.")
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}.")
    with TemporaryDirectory(prefix="shardwise-") as folder:
        index, facts = open_source(source, Path(folder))
        verify(index, facts)
        kinds = Counter(piece.dtype for pieces in index.pieces.values() for piece in pieces)
        formats = ", ".join(f"{count} tensors in {name}" for name, count in kinds.most_common())
        console.out.print(f"{source.name}: {formats}")
        console.out.print(f"writing {facts.num_parameters / 1e6:.1f} M parameters to {out} ...")
        num_bytes = export_model(index, facts, out, DTYPES[dtype])
    console.out.print(f"exported {source}: {console.gib(num_bytes)}, {dtype}")


def _on_rounded(quantize: str, error: float, alone: bool) -> str:
    """What to know of adapters that were trained on rounded matrices."""
    text = f"trained on matrices rounded to {quantize}, {100 * error:.1f}% away from the model's: "
    if alone:
        return text + "load it in 4 bits below them (bitsandbytes nf4), or use --merge"
    return text + "written as they were then, with the adapters merged"


def find_model(source: Path) -> tuple[Path, Plan]:
    """The model directory in a run, a checkpoint or a model directory, and a plan to load it."""
    from shardwise.trainer.state import complete_checkpoints, read_state, why_incomplete

    if (source / ADAPTER_CONFIG).exists():
        return source, Plan(model=str(source), task="lora", layout=Layout())
    if (source / CONFIG_FILE).exists():
        return source, Plan(model=str(source), task="full", layout=Layout())
    checkpoints = complete_checkpoints(source)
    if not checkpoints and (source / "model" / CONFIG_FILE).exists():
        reason = why_incomplete(source)
        if reason is not None:
            raise UserError(f"{source} is not a complete checkpoint: {reason}.")
        checkpoints = [source]
    if not checkpoints:
        raise UserError(
            f"no model at {str(source)!r}: expected a directory with {CONFIG_FILE}, a checkpoint, "
            "or a run with a complete one (models are not downloaded; fetch one first)."
        )
    model = checkpoints[-1] / "model"
    base, then = base_of(model), read_state(checkpoints[-1]).base
    if base is not None and then is not None and then != fingerprint(base):
        raise UserError(
            f"{base} does not hold the weights that the adapters in {model} were trained on; put "
            f"the directory that does into base_model_name_or_path of {model / ADAPTER_CONFIG}."
        )
    return model, load_plan(checkpoints[-1] / PLAN_FILE)
