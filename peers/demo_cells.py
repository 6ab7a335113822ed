"""Cells of demos and courses that use TransformerLens, run unchanged with hookline in its place.

    HF_HOME=FOLDER HF_HUB_OFFLINE=1 python -m hookline.compat.transformer_lens peers/demo_cells.py DEMO...

DEMO is a notebook, or a script with `# %%` cells. Run without `-m hookline.compat.transformer_lens` in an environment
that has TransformerLens, the same program says what passes there. FOLDER is a cache of the hub with random models, as
`stack_hub.py` and `transformerlens_suite.py` make it. For each demo the table says how many cells pass, how many need a
download (of weights, data or packages; or a variable of such a cell), and how many fail. Three things are
changed: `%pip` and `!pip` lines do nothing, figures are made but not shown in a browser, and without a GPU "cuda" in
the code is "cpu". `--replace OLD=NEW` changes the text of cells; `--shorten epochs|steps=3` makes numbers that are
given to these names smaller. `--before FILE` runs a program before the cells, which may put stand-ins in place of
what cannot be downloaded. `--results FILE` writes what happened to each cell, and numbers of the variables that it
sets, as JSON; random numbers are seeded before each cell. `arena.py` compares such files. It needs IPython, and what
the demos import (circuitsvis, plotly, nbformat).
"""

import argparse
import ast
import builtins
import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import runpy
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

NO_NETWORK = {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "DatasetNotFoundError", "ConnectionError", "URLError"}
NO_NETWORK |= {"ConnectError", "RepositoryNotFoundError", "NeedsDownloadError", "gaierror", "MaxRetryError"}
"""Exceptions of programs that find no network."""

Outcome = tuple[int, str, str, dict[str, list[float]]]
"""The index of a cell, whether it passes, why not, and numbers of the variables that it sets."""


class NeedsDownloadError(Exception):
    """A cell runs a program of the shell, to download something."""


class TimeLimitError(Exception):
    """A cell runs longer than the limit."""


def main() -> None:
    """Run the demos, one after the other, each in its own process; print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("demos", nargs="+", type=Path, metavar="DEMO")
    options.add_argument("--limit", type=int, default=120, help="seconds for a cell; a longer one fails (default 120)")
    options.add_argument("--replace", action="append", default=[], metavar="OLD=NEW", help="change the text of cells")
    options.add_argument("--shorten", action="append", default=[], metavar="NAME|NAME=N", help="a smaller number")
    options.add_argument("--before", type=Path, metavar="FILE", help="a program to run before the cells")
    options.add_argument("--results", type=Path, metavar="FILE", help="write outcomes and numbers to this file")
    given = options.parse_args()
    given.replace = dict(each.split("=>") if "=>" in each else each.rsplit("=", 1) for each in given.replace)
    found: dict[str, list[Outcome]] = {}
    print(f"{'demo':44}{'cells':>8}{'pass':>8}{'download':>10}{'fail':>8}", flush=True)
    for demo in given.demos:
        receiving, sending = multiprocessing.get_context("fork").Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=run, args=(demo, given, sending))
        process.start()
        sending.close()
        found[demo.as_posix()] = outcomes = list(received(receiving))
        report(demo, outcomes)
        process.join()
    if given.results is not None:
        given.results.write_text(json.dumps(found), encoding="utf-8")


def received(receiving: Any) -> Iterator[Outcome]:
    """What a process says about its cells, until it ends."""
    with contextlib.suppress(EOFError):
        while True:
            yield receiving.recv()


def report(demo: Path, outcomes: list[Outcome]) -> None:
    """Print the row of a demo, and the reasons of the cells that do not pass."""
    name = demo.stem if demo.suffix == ".ipynb" else f"{demo.parent.name}/{demo.stem}"
    count = Counter(state for _, state, _, _ in outcomes)
    print(f"{name:44}{len(outcomes):8}{count['pass']:8}{count['download']:10}{count['fail']:8}", flush=True)
    for index, state, reason, _ in outcomes:
        if state != "pass":
            print(f"    cell {index}, {state}: {reason}", flush=True)


def run(demo: Path, given: argparse.Namespace, sending: Any) -> None:
    """Run the cells of a demo in this process, and send what happens to each."""
    cells = read(demo, given.replace, given.shorten)
    before = given.before and given.before.resolve()
    os.chdir(demo.resolve().parent)
    sys.path[:0] = [str(demo.resolve().parent), str(demo.resolve().parent.parent)]
    shell = make_shell(demo)
    if before is not None:
        runpy.run_path(str(before), {"DEMO": demo})
    missing: dict[str, str] = {}
    quiet = io.StringIO()
    for index, cell in enumerate(cells):
        if not (names := defined(shell, cell)) and not has_code(shell, cell):
            continue
        seed()
        signal.alarm(given.limit)
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            error = attempt(shell, cell)
        signal.alarm(0)
        quiet.seek(0), quiet.truncate()
        state, reason = judge(error, missing)
        for name in names:
            missing.pop(name, None)
            if state != "pass":
                missing[name] = state
        sending.send((index, state, reason, numbers(shell.user_ns, names) if state == "pass" else {}))


def attempt(shell: Any, cell: str) -> BaseException | None:
    """Run a cell, and return its error."""
    try:
        result = shell.run_cell(cell, store_history=False)
        error: BaseException | None = result.error_before_exec or result.error_in_exec
    except (TimeLimitError, SystemExit) as raised:
        error = raised
    return error


def judge(error: BaseException | None, missing: dict[str, str]) -> tuple[str, str]:
    """Whether a cell passes, needs a download or fails, and the reason."""
    if error is None:
        return "pass", ""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    place = [frame for frame in traceback.extract_tb(error.__traceback__) if "IPython" not in frame.filename]
    if place:
        reason += f" [{Path(place[-1].filename).name}:{place[-1].lineno}]"
    if isinstance(error, NameError) and error.name in missing:
        return missing[error.name], f"{error.name} is of a cell above"
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    kinds = {kind.__name__ for each in chain for kind in type(each).__mro__}
    offline = "offline mode" in reason or "connect to" in reason
    if isinstance(chain[0], ModuleNotFoundError) and not (chain[0].name or "").startswith("transformer_lens"):
        return "download", f"the package {chain[0].name} is not installed"
    return ("download" if kinds & NO_NETWORK or offline else "fail"), reason


def seed() -> None:
    """Start all random numbers anew, so that two libraries draw the same ones in a cell."""
    import numpy as np
    import torch

    random.seed(0), np.random.seed(0), torch.manual_seed(0)


def numbers(variables: dict[str, Any], names: set[str]) -> dict[str, list[float]]:
    """Some numbers of each variable with these names: its size, and up to 40 of its values."""
    found = {name: of_value(variables.get(name)) for name in sorted(names)}
    return {name: values for name, values in found.items() if values}


def of_value(value: Any) -> list[float]:
    """The number of elements of a tensor, an array or a number, and some of them; empty for everything else."""
    import numpy as np
    import torch

    if isinstance(value, bool | int | float | np.ndarray | np.number):
        with contextlib.suppress(TypeError, ValueError):  # arrays of texts
            value = torch.as_tensor(np.asarray(value, dtype=float))
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.layout is not torch.strided:
        return []
    flat = value.detach().double().flatten()
    return [float(flat.numel()), *flat[:: max(1, flat.numel() // 40)].tolist()]


def read(demo: Path, replaced: dict[str, str], shorten: list[str]) -> list[str]:
    """The code cells of a notebook or of a script."""
    text = demo.read_text(encoding="utf-8")
    if demo.suffix == ".ipynb":
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    else:
        parts = re.split(r"(?m)^# ?%%(.*)$", text)
        marked = zip(parts[1::2], parts[2::2], strict=True)
        cells = [parts[0], *(code for mark, code in marked if "[markdown]" not in mark)]
    import torch

    if not torch.cuda.is_available():
        replaced = replaced | {".cuda()": "", '"cuda"': '"cpu"', "'cuda'": "'cpu'"}
    for old, new in replaced.items():
        cells = [cell.replace(old, new) for cell in cells]
    for each in shorten:
        cells = [smaller(cell, *each.rsplit("=", 1)) for cell in cells]
    return cells


def smaller(cell: str, names: str, most: str) -> str:
    """A cell in which whole numbers that are given to these names are at most so large."""
    number = re.compile(rf"\b((?:{names})(?:: int)? ?= ?)([0-9_]+)\b(?!\.)")
    return number.sub(lambda found: found[1] + str(min(int(found[2]), int(most))), cell)


def make_shell(demo: Path) -> Any:
    """A shell of IPython that shows no figures and installs nothing."""
    from IPython.core.interactiveshell import InteractiveShell

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeLimitError("the cell runs longer than the limit")

    def system(command: str) -> None:
        if "pip" not in command.split()[:3]:
            raise NeedsDownloadError(command)

    signal.signal(signal.SIGALRM, stop)
    os.environ |= {"BROWSER": "true", "MPLBACKEND": "Agg", "WANDB_MODE": "disabled", "TQDM_DISABLE": "1"}
    shell = InteractiveShell.instance()
    shell.extension_manager.load_extension("storemagic")  # as notebooks do
    shell.showtraceback = lambda *_, **__: None
    shell.system = shell.getoutput = system
    for name in ("pip", "conda"):
        shell.register_magic_function(lambda _line: None, magic_name=name)
    shell.user_ns["__file__"] = str(demo.resolve())
    builtins.exit = builtins.quit = sys.exit
    return shell


def tree(shell: Any, cell: str) -> ast.Module:
    """The code of a cell, its magics as calls; empty if it is not Python."""
    try:
        return ast.parse(shell.transform_cell(cell))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def has_code(shell: Any, cell: str) -> bool:
    """Whether there is something to run in a cell."""
    return bool(tree(shell, cell).body)


def defined(shell: Any, cell: str) -> set[str]:
    """The names that a cell defines."""
    names: set[str] = set()
    for node in ast.walk(tree(shell, cell)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s")
