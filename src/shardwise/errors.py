"""The errors a user can meet: one line each, with an exit code."""

from __future__ import annotations


class ShardwiseError(Exception):
    """Base of every error that Shardwise raises on purpose. Its text is one complete sentence."""

    exit_code = 1


class UserError(ShardwiseError):
    """Bad input. Names what is wrong, the numbers in conflict and a value that works."""

    exit_code = 2


class RunFailed(ShardwiseError):
    """A rank of a running job failed; the message ends with that rank's own traceback."""

    exit_code = 1


class Interrupted(ShardwiseError):
    """The user (or the system) asked for the end, by Ctrl-C or SIGTERM."""

    exit_code = 130


def missing_extra(package: str, extra: str, purpose: str) -> UserError:
    """The error for a feature whose optional dependency is not installed."""
    return UserError(f"{purpose} needs the package {package!r}: pip install 'shardwise[{extra}]'.")
