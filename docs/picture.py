"""Turn a terminal recording into the picture of the README.

script -qec "make quickstart" recording.txt
python docs/picture.py recording.txt docs/quickstart.svg
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 110
_NOT_OURS = ("Script ", "WARNING")  # the recorder's words, and pip's
_ERASED = re.compile(r"\x1b\[2K")
_OTHER_CONTROLS = re.compile(r"\x1b\[\?25[lh]|\x1b\[\d*[ABCDGK]|\r")


def final_lines(recording: str) -> list[str]:
    """What each line shows in the end: of a line drawn again and again, the last drawing."""
    lines = []
    for line in recording.replace("\r\n", "\n").split("\n"):
        drawings = [_OTHER_CONTROLS.sub("", part) for part in _ERASED.split(line)]
        lines.append(next((d for d in reversed(drawings) if d.strip()), ""))
    return lines


def main() -> None:
    """Read the recording, write the SVG."""
    source, target = map(Path, sys.argv[1:3])
    recording = source.read_bytes().decode()  # as bytes: a carriage return is no end of a line
    lines = [Text.from_ansi(line) for line in final_lines(recording)]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for line in lines:
        if not line.plain.startswith(_NOT_OURS):
            console.print(line, soft_wrap=False)
    target.write_text(console.export_svg(title="make quickstart"), encoding="utf-8")


if __name__ == "__main__":
    main()
