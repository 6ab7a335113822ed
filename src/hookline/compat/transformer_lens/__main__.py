"""Run a program with hookline in place of TransformerLens.

python -m hookline.compat.transformer_lens script.py --its-options
python -m hookline.compat.transformer_lens -m pytest tests
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from hookline.compat.transformer_lens._impl.standin import PACKAGE, install

USAGE = f"""usage: python -m {PACKAGE} SCRIPT [ARGUMENT …]
       python -m {PACKAGE} -m MODULE [ARGUMENT …]

Runs a script or a module, as python does, with hookline in place of TransformerLens: `import transformer_lens`
in it imports {PACKAGE}."""


def main(arguments: list[str]) -> int:
    """Run the program; its exit code and its exceptions are passed on."""
    if arguments in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    is_module, rest = arguments[:1] == ["-m"], arguments[1:]
    if not arguments or (is_module and not rest) or (arguments[0].startswith("-") and not is_module):
        print(USAGE, file=sys.stderr)
        return 2
    install()
    if is_module:
        sys.argv = rest  # run_module sets the first one to the path of the module
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif not Path(arguments[0]).exists():
        print(f"there is no file {arguments[0]!r}", file=sys.stderr)
        return 2
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
