"""What every command has in common: its output as text or JSON, its errors, and its exit status."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import typer.core


class ExitCode(IntEnum):
    """The exit statuses of `hookline`; docs/cli.md has the table."""

    OK = 0
    CHECK_FAILED = 1
    USAGE = 2
    ERROR = 3
    BUG = 4
    INTERRUPTED = 128 + signal.SIGINT
    CLOSED_PIPE = 128 + 13  # SIGPIPE, which Windows does not have


@dataclass(frozen=True)
class Answer:
    """What a command found. With `--json`, `values` are printed, otherwise `text`."""

    as_json: bool
    values: dict[str, Any]
    text: object = None
    """None if the command has printed it."""
    is_good: bool = True
    """Whether the checks of the command passed; if not, the exit status is 1."""
    then: Callable[[], object] | None = None
    """What is done after printing, until Ctrl-C: the explorer serves its page."""


class Commands(typer.core.TyperGroup):
    """The commands of `hookline`: they return an `Answer` or raise, and printing and exiting is done here."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit with its status."""
        rest: dict[str, Any] = {"prog_name": prog_name, "complete_var": complete_var, "standalone_mode": False}
        rest |= {"windows_expand_args": windows_expand_args, **extra}
        if not standalone_mode:
            return super().main(args, **rest)
        args = list(sys.argv[1:] if args is None else args)
        wants_json = "--json" in args
        _escape_what_cannot_be_encoded()
        try:
            with redirect_stdout(sys.stderr) if wants_json else nullcontext():  # whatever libraries print
                result = super().main(args, **rest)
            if result == ExitCode.INTERRUPTED:  # what typer makes of it
                raise KeyboardInterrupt
            status = _shown(result) if isinstance(result, Answer) else int(result or 0)
        except (KeyboardInterrupt, typer.Abort):
            status = _report("Interrupted", "interrupted", ExitCode.INTERRUPTED, wants_json)
        except SystemExit as error:  # typer exits after completion, and if it cannot print
            status = ExitCode.CLOSED_PIPE if isinstance(error.__context__, BrokenPipeError) else int(error.code or 0)
        except BrokenPipeError:
            status = ExitCode.CLOSED_PIPE
        except Exception as error:
            status = _report(type(error).__name__, *_explained(error), wants_json)
        sys.exit(_flushed(status))


def _shown(answer: Answer) -> ExitCode:
    shown = json.dumps(answer.values, indent=1) if answer.as_json else answer.text
    with suppress(KeyboardInterrupt) if answer.then is not None else nullcontext():
        if shown is not None:
            print(shown, flush=True)
        if answer.then is not None:
            answer.then()
    return ExitCode.OK if answer.is_good else ExitCode.CHECK_FAILED


def _flushed(status: int) -> int:
    """The exit status after all output is written; nothing is said if its reader has left, as `… | head -1` does."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        if isinstance(error, BrokenPipeError):
            return ExitCode.CLOSED_PIPE
        return _report("OSError", f"cannot write the output: {error.strerror}", ExitCode.ERROR, as_json=False)
    return int(status)


def _explained(error: Exception) -> tuple[str, ExitCode]:
    """The message of an error and its exit status. An error that is nobody's fault but ours keeps its traceback."""
    if hasattr(error, "format_message"):  # typer's: a wrong option, a missing argument
        context = getattr(error, "ctx", None)
        command = "hookline" if context is None else context.command_path
        why = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help
            _say(why)
            why = "the name of a command is missing"
        return f"{why.rstrip('.')}; see {command} --help", ExitCode.USAGE
    if _is_expected(error):
        return str(error) or type(error).__name__, ExitCode.ERROR
    _say("".join(traceback.format_exception(error)).rstrip())
    return f"{type(error).__name__}: {error} (this is a bug in hookline: please report it)", ExitCode.BUG


def _is_expected(error: Exception) -> bool:
    """Whether the error is about what was given, or about this machine: no such model, no permission, no memory."""
    from hookline.errors import HooklineError

    if isinstance(error, HooklineError | OSError | MemoryError):
        return True
    if "torch" not in sys.modules:
        return False
    from hookline.transformer.memory.halving import is_out_of_memory

    return is_out_of_memory(error)


def _report(kind: str, message: str, code: ExitCode, as_json: bool) -> ExitCode:
    """Print an error: as JSON on stdout, or as one line on stderr."""
    if as_json:
        with suppress(OSError):  # stdout cannot be written to, which may be the error
            print(
                json.dumps({"error": {"type": kind, "message": message, "exit_code": int(code)}}, indent=1), flush=True
            )
            return code
    _say(f"error: {one_line(message)}")
    return code


def _say(text: str) -> None:
    with suppress(BrokenPipeError):  # nobody reads it
        print(text, file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """A text without line breaks, and with its control characters escaped: they may be in the name of a file."""
    characters = " ".join(text.split())
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in characters
    )


def _escape_what_cannot_be_encoded() -> None:
    """Do not fail at a character that the terminal's encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
