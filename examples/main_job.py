"""A small MoE job, end to end: what `make run` runs.

    python examples/main_job.py examples/text/experts.txt

1. the layer of 01_moe_layer.py on the text, over 4 processes; 2. the accidents of 06_failures.py;
3. a short table of times. Exit code 0 if everything is as it should be. Needs no PyTorch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

HERE = Path(__file__).parent
BENCH = ["--profile", "deepseek-v3", "--ranks", "4", "--tokens", "8", "128", "512"]
BENCH += ["--baselines", "memcpy", "sockets", "--iterations", "25"]


def parts(text: str) -> list[tuple[str, list[str]]]:
    """(heading, command) of each part."""
    return [
        ("A mixture-of-experts layer over 4 processes", [str(HERE / "01_moe_layer.py"), text, "--ranks", "4"]),
        ("What happens when something goes wrong", [str(HERE / "06_failures.py")]),
        ("How long an exchange takes", ["-m", "tokenway.cli", "bench", *BENCH]),
    ]


def main() -> int:
    """Runs the parts, all of them, and says which failed."""
    if len(sys.argv) != 2:
        print(f"usage: python {sys.argv[0]} FILE", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    start, failed = time.monotonic(), []
    for number, (heading, command) in enumerate(parts(sys.argv[1]), 1):
        console.rule(f"[bold]{number}. {heading}", align="left")
        sys.stdout.flush()  # the part writes to the same place
        code = subprocess.run([sys.executable, *command], check=False).returncode
        if code:
            failed.append(heading)
            console.print(f"[red]exit code {code}[/]")
        console.print()
    seconds = time.monotonic() - start
    if failed:
        console.print(f"[red]FAILED[/] after {seconds:.0f} s: {'; '.join(failed)}")
        return 1
    console.print(f"[green]Everything is as it should be.[/] {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
