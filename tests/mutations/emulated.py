"""Builds mutants of the CUDA backend for emulated devices: the build of tests/emulator, in which one file is another.

Takes the changed files, which are sources and no headers; gives a library that Python loads.
"""

import importlib.util
import shlex
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def loaded(path: Path) -> Any:
    """A module by its file: the one wanted has the name of a file beside this one."""
    spec = importlib.util.spec_from_file_location("emulator_run", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


emulator = loaded(ROOT / "tests" / "emulator" / "run.py")
LIBRARY = emulator.BUILD / "emulator" / "libtokenway.so"


def build_control() -> str:
    """Builds what the mutants differ from. Why it cannot be; "" if it is there."""
    return "" if emulator.build("tokenway_emulated") else emulator.NOTHING


def build_mutant(changed: dict[str, str], overlay: Path) -> Path:
    """changed: texts of sources by their paths in the tree."""
    said = subprocess.run(
        [str(emulator.TOOLS / "ninja"), "-C", str(emulator.BUILD), "-t", "commands", "tokenway_emulated"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    link = next(line for line in reversed(said) if "-o emulator/libtokenway.so" in line)
    for number, (file, text) in enumerate(changed.items()):
        mutant = overlay / file
        mutant.parent.mkdir(parents=True, exist_ok=True)
        mutant.write_text(text)
        source, command = command_of(said, ROOT / file)
        if source != ROOT / file:  # one of several that are compiled together
            together = overlay / f"together{number}.cxx"
            together.write_text(source.read_text().replace(str(ROOT / file), str(mutant)))
            mutant = together
        words = shlex.split(command)
        at = words.index("-o") + 1
        made, words[at] = words[at], str(overlay / f"mutant{number}.o")
        words[words.index("-c") + 1] = str(mutant)
        words = [word for word in words if word != "ccache"]
        subprocess.run(words, cwd=emulator.BUILD, capture_output=True, text=True, check=True)
        link = link.replace(f" {made} ", f" {overlay}/mutant{number}.o ")
    library = overlay / "libtokenway.so"
    command = link.replace("-o emulator/libtokenway.so", f"-o {library}")
    subprocess.run(command.removeprefix(": && ").removesuffix(" && :"), shell=True, cwd=emulator.BUILD, check=True)
    return library


def command_of(commands: list[str], file: Path) -> tuple[Path, str]:
    """(what is compiled, how), of a source or of that which includes it."""
    for command in commands:
        if " -c " not in command:
            continue
        source = Path(command.split(" -c ")[1].split()[0])
        if source == file or (source.suffix == ".cxx" and f'"{file}"' in source.read_text()):
            return source, command
    raise ValueError(f"nothing compiles {file}")
