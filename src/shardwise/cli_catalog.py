"""The verbs of `shardwise catalog`: the facts that planning rests on."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def example(*lines: str) -> str:
    """The end of a verb's help."""
    return "\n\n".join(["[bold]Example[/bold]", *(f"  $ {line}" for line in lines)])


JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
catalog = typer.Typer(
    help="The facts that planning rests on.", epilog=example("shardwise catalog devices")
)


@catalog.command("schema", epilog=example("shardwise catalog schema > plan.schema.json"))
def schema() -> None:
    """Print the JSON schema of plan.yaml."""
    from shardwise.config import plan_schema

    typer.echo(json.dumps(plan_schema(), indent=2))


@catalog.command("devices", epilog=example("shardwise catalog devices"))
def devices(as_json: JsonOption = False) -> None:
    """List the accelerators that a plan can name."""
    from shardwise.catalog import load_devices

    if as_json:
        rows = [device.model_dump() for device in load_devices().values()]
        typer.echo(json.dumps(rows, indent=2))
        return
    for device in load_devices().values():
        rate = "?" if device.bf16_tflops is None else f"{device.bf16_tflops:.0f}"
        typer.echo(
            f"{device.name:<12} {device.usable_gib:7.2f} GiB {rate:>5} bf16 TFLOP/s  "
            f"{device.source} ({device.date})"
        )


@catalog.command("prices", epilog=example("shardwise catalog prices"))
def prices(as_json: JsonOption = False) -> None:
    """List the instances that a plan can name, with price, date and source."""
    from shardwise.catalog import load_catalog

    rows = load_catalog().prices
    if as_json:
        typer.echo(json.dumps([row.model_dump() for row in rows], indent=2))
        return
    for row in rows:
        name = f"{row.provider}:{row.instance}@{row.region}"
        typer.echo(
            f"{name:<42} {row.count}x{row.device:<11} {row.usd_per_hour:7.2f} USD an hour, "
            f"{row.kind}; {row.date}; {row.source}"
        )


@catalog.command("models", epilog=example("shardwise catalog models"))
def models(as_json: JsonOption = False) -> None:
    """List the models that a plan can name: parameters, those that work on a token, context."""
    from shardwise.console import count
    from shardwise.planner.capabilities import known_models

    rows = known_models()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo(
        f"{'name':<30} {'hub':<45} {'family':<17} {'params':>8} {'active':>7} {'context':>9}"
    )
    for row in rows:
        active = count(row["active"]) if row["active"] else "-"
        typer.echo(
            f"{row['name']:<30} {row['hub'][0]:<45} {row['family']:<17} "
            f"{count(row['parameters']):>8} {active:>7} {row['context']:>9}  "
            f"{'runs' if row['runs'] else 'planned only'}"
        )


@catalog.command("families", epilog=example("shardwise catalog families"))
def families(as_json: JsonOption = False) -> None:
    """List the model families and the kinds of parallelism that are proved for each."""
    from shardwise.models.families import FAMILIES
    from shardwise.planner.capabilities import table

    if as_json:
        proved = {row.model_type: row.proved for row in FAMILIES.values()}
        typer.echo(json.dumps(proved, indent=2))
        return
    typer.echo(table())
