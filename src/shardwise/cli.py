"""The command line: each verb checks its input, calls the library, and prints.

Heavy imports happen inside the verbs, so that `--help` and `plan` start in a moment.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from shardwise import __version__
from shardwise.cli_catalog import JsonOption, catalog, example
from shardwise.errors import ShardwiseError, UserError

if TYPE_CHECKING:
    from shardwise.config import Layout


app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=example(
        "shardwise plan ./my-model --gpus cpu:2 --out plan.yaml",
        "shardwise train plan.yaml --data rows.jsonl --out run",
    ),
)
app.add_typer(catalog, name="catalog")

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a plan value, like layout.tp=3."),
]
LayoutOption = Annotated[
    str | None,
    typer.Option("--layout", metavar="AXES", help="Use this layout, like fsdp=2,tp=3."),
]


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def shardwise(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Plan, fine-tune and serve large language models over many devices with one plan file."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(
    epilog=example(
        "shardwise plan ./SmolLM2-135M-Instruct --gpus cpu:2 --memory 2 --seq-len 160 "
        "--out plan.yaml",
        "shardwise plan llama-3.1-8b --gpus 2x8xH100-80GB --seq-len 8192 --global-batch 64",
        "shardwise plan llama-3.1-8b --instance aws:p5.48xlarge@us-east-1 --count 2 "
        "--tokens 1.5B --top 3",
        "shardwise plan llama-3.1-70b --task serve --gpus 8xH100-80GB --weights fp8 "
        "--concurrency 64 --prompt-len 1024 --output-len 512 --ttft 2000 --top 3",
    )
)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A directory with config.json, that file, a GGUF file, a hub id, or a name of "
            "`shardwise catalog models`."
        ),
    ],
    task: Annotated[str, typer.Option(help="full fine-tuning, lora, qlora or serve.")] = "full",
    gpus: Annotated[
        str | None,
        typer.Option(help="Devices: cpu:2, 8xH100-80GB, or nodes x devices, 2x8xH100-80GB."),
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(metavar="P:I@REGION", help="Rented ones: aws:p5.48xlarge@us-east-1."),
    ] = None,
    count: Annotated[int | None, typer.Option(help="How many instances; 1 by default.")] = None,
    memory: Annotated[
        float | None, typer.Option(help="Memory of one device in GiB, if not all of it.")
    ] = None,
    layout: LayoutOption = None,
    seq_len: Annotated[int | None, typer.Option(help="Longest row in tokens.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Rows of one optimizer step.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Rows of one pass, at most.")] = None,
    precision: Annotated[str | None, typer.Option(help="Compute dtype: fp32 or bf16.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Serving: prompt and answer in tokens, at most.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Serving on accelerators: requests at a time; 1 by default.")
    ] = None,
    prompt_len: Annotated[int | None, typer.Option(help="Mean tokens of a prompt.")] = None,
    output_len: Annotated[int | None, typer.Option(help="Mean tokens of an answer.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Planned, not run: bf16, fp8, int8, int4, fp4 or mxfp4 weights."),
    ] = None,
    ttft: Annotated[float | None, typer.Option(help="Most milliseconds to a first token.")] = None,
    tpot: Annotated[float | None, typer.Option(help="Most milliseconds between tokens.")] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Measured speeds, written by `shardwise probe`.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Tokens to train (or to answer), like 1.5B: gives hours, priced USD."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Or rows to train, each as long as --seq-len.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Times that rows are trained.")] = None,
    price: Annotated[
        float | None, typer.Option(help="USD of one device an hour. Default: the instance's.")
    ] = None,
    overhead: Annotated[
        float, typer.Option(min=0, help="Time lost to restarts and idling, as a share.")
    ] = 0.0,
    catalog_file: Annotated[
        Path | None,
        typer.Option("--catalog", help="YAML that replaces facts: devices, prices, tables."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Show so many of the best layouts.")] = 1,
    set_: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="Write the chosen plan here.")] = None,
    find_gpus: Annotated[
        bool,
        typer.Option("--find-gpus", help="Find the cheapest rented machines that do the job."),
    ] = False,
    within: Annotated[
        float | None, typer.Option(metavar="HOURS", help="With --find-gpus: at most so long.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="USD", help="With --find-gpus: at most so much.")
    ] = None,
    region: Annotated[
        str | None, typer.Option(help="With --find-gpus: a part of a region's name.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the answer here, as one page for a browser.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Does it fit one device? What would make it fit? Which layout, how fast, and at what price.

    Ends with exit code 1 if no layout over the given devices fits. Needs no GPU and no torch.
    """
    from shardwise import console
    from shardwise.api import find_gpus as make_rentals
    from shardwise.api import plan as make_plan
    from shardwise.planner.cost import Job, Rate, read_tokens
    from shardwise.planner.machine import load_machine
    from shardwise.planner.rent import (
        Limits,
        check_alone,
        nothing_found,
        render_rentals,
        rentals_json,
    )
    from shardwise.planner.report import render, to_json
    from shardwise.planner.serving_report import plan_to_run
    from shardwise.planner.serving_search import why_not_run

    if tokens is not None and rows is not None:
        raise UserError(f"--tokens {tokens} and --rows {rows} both say how much; give one.")
    if epochs is not None and rows is None:
        raise UserError(f"--epochs {epochs} is of --rows; say how many rows there are.")
    if count is not None and instance is None:
        raise UserError(f"--count {count} is of --instance; for devices write --gpus {count}x...")
    job = Job(
        tokens=None if tokens is None else read_tokens(tokens),
        rows=rows,
        rate=None if price is None else Rate.given(price),
        overhead=overhead,
    )
    shortcuts = {
        "train.seq_len": seq_len,
        "train.global_batch": global_batch,
        "train.micro_batch": micro_batch,
        "train.epochs": epochs,
        "precision.compute": precision,
        "serve.context": context,
        "serve.concurrency": concurrency,
        "serve.prompt_len": prompt_len,
        "serve.output_len": output_len,
        "serve.weights": weights,
        "serve.ttft_ms": ttft,
        "serve.tpot_ms": tpot,
    }
    given = [f"{key}={value}" for key, value in shortcuts.items() if value is not None]
    rentals = None
    if find_gpus:
        check_alone(gpus=gpus, instance=instance, cluster=cluster, layout=layout, price=price)
        check_alone(memory=memory, count=count)
        rentals = make_rentals(
            model,
            job=job,
            limits=Limits(hours=within, usd=budget, region=region),
            task=task,  # type: ignore[arg-type]
            overrides=[*given, *(set_ or [])],
            catalog_file=catalog_file,
        )
        if not rentals.found:
            raise UserError(nothing_found(rentals))
    elif (within, budget, region) != (None, None, None):
        raise UserError("--within, --budget and --region are of --find-gpus; give that too.")
    answer = (
        rentals.found[0].answer
        if rentals
        else make_plan(
            model,
            task=task,  # type: ignore[arg-type]  # checked with the rest of the plan
            gpus=gpus,
            instance=instance,
            num_instances=1 if count is None else count,
            memory_gib=memory,
            layout=None if layout is None else _layout(layout),
            machine=load_machine(cluster) if cluster else None,
            overrides=[*given, *(set_ or [])],
            job=job,
            catalog_file=catalog_file,
        )
    )
    if as_json:
        data = to_json(answer, top=top)
        if rentals is not None:
            data["rentals"] = rentals_json(rentals)
        typer.echo(json.dumps(data, indent=2))
    else:
        if rentals is not None:
            console.out.print(render_rentals(rentals, top=max(top, 5)))
        console.out.print(render(answer, top=top))
    written = []
    if html is not None:
        from shardwise.planner.page import page

        _write(html, page(answer))
        written.append(html)
    to_run = plan_to_run(answer)
    if out is not None and to_run is not None:
        _write(out, to_run.to_yaml())
        written.append(out)
    if not as_json:
        for file in written:
            console.out.print(f"written: {file}")
    if answer.chosen is None:
        raise typer.Exit(1)
    if out is not None and to_run is None:
        raise UserError(
            f"nothing is written to {out}: {why_not_run(answer.chosen)}; "
            "`shardwise serve` runs bf16 with --layout tp=N or on one device."
        )


@app.command(
    epilog=example("shardwise train plan.yaml --data rows.jsonl --eval-data eval.jsonl --out run")
)
def train(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    data: Annotated[Path, typer.Option(help='JSON lines of {"messages": [...]}.')],
    out: Annotated[Path, typer.Option(help="Directory of the run.")],
    eval_data: Annotated[
        Path | None, typer.Option(help="Rows for the loss before and after.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Continue from the newest complete checkpoint.")
    ] = False,
    check_replicas: Annotated[
        bool, typer.Option(help="Stop if replicas or tied copies differ by a bit after a step.")
    ] = False,
    set_: SetOption = None,
) -> None:
    """Fine-tune with a plan's layout: starts the processes, shows loss, tokens/s and memory."""
    from shardwise.config import load_plan
    from shardwise.launch.start import start_train

    switches = ["train.check_replicas=true"] if check_replicas else []
    plan_ = load_plan(plan_file, [*(set_ or []), *switches])
    start_train(plan_, data=data, eval_data=eval_data, run_dir=out, resume=resume)


@app.command(epilog=example("shardwise export run --out my-model --dtype bf16 --check"))
def export(
    source: Annotated[
        Path, typer.Argument(help="A run, a checkpoint, a model directory, or a GGUF file.")
    ],
    out: Annotated[Path, typer.Option(help="The Hugging Face directory to write.")],
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16. Default: the model's own.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge adapters into the model, and write that.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Load it with plain transformers and compare its logits with the sharded model's.",
        ),
    ] = False,
) -> None:
    """Write a checkpoint as a plain Hugging Face directory, streaming tensor by tensor.

    Of a run that trained adapters, it writes these as PEFT reads them, or the merged model."""
    from shardwise.launch.export import start_export

    start_export(source, out, dtype, merge=merge, check=check)


@app.command(
    epilog=example(
        "shardwise serve my-model --layout tp=3",
        "curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' "
        '-d \'{"model": "my-model", "messages": [{"role": "user", "content": "Hello"}]}\'',
    )
)
def serve(
    model: Annotated[
        str, typer.Argument(help="A model directory, a run, a plan, or a cached hub id.")
    ],
    layout: LayoutOption = None,
    gpus: Annotated[
        str | None, typer.Option(help="Devices, like cpu:3. Default: cpu, one per rank.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the server.")] = None,
    set_: SetOption = None,
) -> None:
    """Serve a model over the OpenAI API, split over processes by tensor parallelism."""
    from shardwise.api import base_plan
    from shardwise.config import Layout, load_plan, with_overrides
    from shardwise.launch.export import find_model
    from shardwise.launch.start import start_serve
    from shardwise.models.lookup import local_model

    overrides = [*([f"serve.port={port}"] if port is not None else []), *(set_ or [])]
    if Path(model).suffix in (".yaml", ".yml"):
        if layout is not None or gpus is not None:
            raise UserError("a plan file has its own layout and devices; change them with --set.")
        plan_ = load_plan(model, overrides)
    else:
        shape = Layout() if layout is None else _layout(layout)
        directory, _ = find_model(Path(local_model(model)))
        base = base_plan(str(directory.resolve()), "serve", shape, gpus)
        plan_ = with_overrides(base, overrides)
    start_serve(plan_)


@app.command(epilog=example("shardwise probe --processes 2 --out cluster.yaml"))
def probe(
    processes: Annotated[int, typer.Option(min=1, help="Processes that work at once.")] = 1,
    kind: Annotated[str, typer.Option(help="cpu, or an accelerator's catalogue name.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Write the measurements here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure matrix products, memory traffic and collectives of this machine (half a minute)."""
    from shardwise import console
    from shardwise.launch.start import start_probe

    if not as_json:
        console.out.print(f"measuring with {processes} process(es), about ten seconds ...")
    machine = start_probe(processes, kind)
    if out is not None:
        _write(out, machine.to_yaml())
    if as_json:
        typer.echo(machine.model_dump_json(indent=2))
        return
    for name, flops in machine.matmul_flops.items():
        console.out.print(f"{name} matrix products: {flops / 1e9:.0f} GFLOP/s a process")
    console.out.print(f"memory traffic: {machine.memory_bytes_per_s / 1e9:.1f} GB/s a process")
    for timing in machine.collectives:
        size = f"{timing.num_bytes / 2**20:.4g} MiB"
        console.out.print(f"{timing.op:>14} {size:>12}: {timing.seconds * 1e3:.2f} ms")
    if out is not None:
        console.out.print(f"written: {out}")


@app.command(epilog=example("shardwise report run"))
def report(
    run: Annotated[Path, typer.Argument(help="Directory of a finished run.")],
    as_json: JsonOption = False,
) -> None:
    """Planned against measured: peak memory per process and step time."""
    from shardwise import console
    from shardwise.trainer.report import compare, render

    rows = compare(run)
    if as_json:
        typer.echo(json.dumps([row.model_dump() for row in rows], indent=2))
    else:
        console.out.print(render(rows))


@app.command(
    epilog=example("shardwise inspect run", "shardwise inspect run/checkpoints/step-000024/model")
)
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            help="A directory of a model or of adapters, a run, one of its checkpoints, a plan, a "
            "config.json, or a GGUF file."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """What is it, is it whole, and does Shardwise run it? Reads headers and sizes, no weights.

    Ends with exit code 1 if something is missing, cut short or incomplete. Needs no torch.
    """
    from shardwise import console
    from shardwise.launch.found import render
    from shardwise.launch.inspect import look_at

    found = look_at(path)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        console.out.print(render(found))
    if found.problems:
        raise typer.Exit(1)


def _layout(text: str) -> Layout:
    from shardwise.config import Layout
    from shardwise.parsing import parse, read_yaml

    pairs = [item.partition("=") for item in text.split(",")]
    if not all(key.strip() and sep for key, sep, _ in pairs):
        raise UserError(f"--layout {text!r} is not of the form axis=N,axis=N, like fsdp=2,tp=3.")
    values = {key.strip(): read_yaml(value) for key, _, value in pairs}
    return parse(Layout, values, source="--layout")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}.") from None


def main() -> None:
    """Entry point: an error is one line on stderr, with its exit code."""
    try:
        sys.exit(app(standalone_mode=False))
    except TyperException as error:  # the arguments themselves
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "shardwise"
        _fail(f"{error.format_message().rstrip('.')}; see `{command} --help`.", 2)
    except OSError as error:  # a file that cannot be read or written, wherever it is met
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}.", 2)
    except ShardwiseError as error:
        if isinstance(error, UserError) and os.environ.get("RANK", "0") != "0":
            sys.exit(error.exit_code)  # the first rank says it
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted.", 130)


def _fail(message: str, code: int) -> None:
    typer.echo(f"shardwise: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
