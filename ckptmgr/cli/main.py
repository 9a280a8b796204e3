"""`ckptmgr`: parse, call, print. Every error is one line on stderr and an exit code; tracebacks only with `-v`."""

from __future__ import annotations

import codecs
import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ckptmgr.cli import (
    artifacts,
    collecting,
    configuring,
    doctor,
    draining,
    looking,
    moving,
    pruning,
    pulling,
    status,
    story,
    verifying,
)
from ckptmgr.cli.command import Group, InterruptedCommand, OutputClosed
from ckptmgr.cli.output import STDOUT, fail, stdout_named
from ckptmgr.core.redaction import without_secrets

_EPILOG = """\b
RUN is a run URL: s3://bucket/exp/run, oss://bucket/exp/run, file:///dir/run,
or a path. Credentials are found where the provider's own tools find them
(AWS_*, AWS_ENDPOINT_URL, ~/.aws; OSS_ENDPOINT, OSS_ACCESS_KEY_ID, ...).

\b
Exit codes:
  0  done                            5  damaged data
  1  unexpected                      6  uploads still pending
  2  usage, configuration            7  conflict: would mix or overwrite
  3  nothing to resume, not found    75 requeue
  4  store unavailable or refused    130, 143 signals"""

_INTERRUPTED = 130
# New objects between two looks for cycles. A command makes few cycles and, for a run of 10,000 checkpoints, a million objects, which Python's 700
# would have it go through again and again, for a third of the command's time.
_OBJECTS_PER_LOOK = 100_000

app = typer.Typer(
    name="ckptmgr",
    cls=Group,
    help="Checkpoints of PyTorch training: saved locally, uploaded on the side, resumed by one command.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_FAMILIES = (
    story,
    looking,
    verifying,
    moving,
    pulling,
    draining,
    status,
    pruning,
    collecting,
    artifacts,
    configuring,
    doctor,
)
for family in _FAMILIES:
    family.register(app)


@app.callback()
def _options(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Say what happens, and show tracebacks; anywhere on the line.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    _log_to_stderr(verbose=moving.Invocation.of(context).verbose)


def main(argv: Sequence[str] | None = None) -> None:
    """The console script; ends the process with the exit code."""
    _open_closed_streams()
    codecs.register_error("ckptmgr-bytes", _as_bytes)
    sys.stdout.reconfigure(errors="ckptmgr-bytes")  # type: ignore[union-attr]
    gc.set_threshold(_OBJECTS_PER_LOOK)
    code = run(sys.argv[1:] if argv is None else list(argv))
    if code == _INTERRUPTED:
        # Threads that still wait for a store would hold up the end of the interpreter.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    gc.freeze()  # what ends with the process need not be gone through once more at its end
    sys.exit(code)


def _as_bytes(error: UnicodeError) -> tuple[str | bytes, int]:
    """What stdout's encoding has no characters for goes there as the bytes of a file name: what `resume` prints must open."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    try:
        return os.fsencode(text), error.end
    except UnicodeEncodeError:
        return "?" * len(text), error.end


def _open_closed_streams() -> None:
    """Put /dev/null where the caller has closed a standard stream: the next file or socket would get its number, and COMMAND would write there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    words, command = _split_command(argv)
    verbose = any(word in ("-v", "--verbose") for word in words)
    words = [word for word in words if word not in ("-v", "--verbose")]
    if words == ["--version"]:
        from ckptmgr import __version__

        print(f"ckptmgr {__version__}")
        return 0
    try:
        _refuse_empty(words)
        code = app(
            args=words, prog_name="ckptmgr", standalone_mode=False, obj=moving.Invocation(command, verbose=verbose)
        )
        with stdout_named():
            sys.stdout.flush()
    except (OutputClosed, BrokenPipeError):
        _give_up_stdout()
        return 0
    except (InterruptedCommand, KeyboardInterrupt):
        fail("interrupted")
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends as one line and an exit code
        if verbose:
            import traceback

            print(without_secrets("".join(traceback.format_exception(error))), end="", file=sys.stderr)
        return _report(error)
    return code if isinstance(code, int) else 0


def _give_up_stdout() -> None:
    """What is still in the buffer would fail once more at the end of the interpreter."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _split_command(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The words of ckptmgr, and the COMMAND of `resume` after the first `--`; None without one, or for another command."""
    words = list(argv)
    name = next((word for word in words if not word.startswith("-")), "")
    if name != "resume" or "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _refuse_empty(words: Sequence[str]) -> None:
    """Raise ConfigError if a word or the value of an option is empty: a variable that is not set, and as a path the working directory."""
    for at, word in enumerate(words, start=1):
        if not word or (word.startswith("--") and word.endswith("=")):
            from ckptmgr.core.errors import ConfigError

            what = f"the value of {word[:-1]}" if word else _name_of(words[:at])
            raise ConfigError(f"{what} must not be empty", hint="is a variable of the script unset?")


def _name_of(words: Sequence[str]) -> str:
    """What the last of `words` is to their command: RUN, or the value of --to."""
    command: Any = typer.main.get_command(app)
    left = list(words)
    while left and left[0] in getattr(command, "commands", {}):
        command = command.commands[left.pop(0)]
    options = {name: param for param in command.params for name in param.opts if name.startswith("-")}
    arguments = [param.metavar or param.name.upper() for param in command.params if param.param_type_name == "argument"]
    at, option = 0, ""
    for word in left[:-1]:
        if option:
            option = ""
        elif word in options and not options[word].is_flag:
            option = word
        elif not word.startswith("-"):
            at += 1
    if option:
        return f"the value of {option}"
    return arguments[at] if at < len(arguments) else f"argument {len(words)} of `ckptmgr {words[0]}`"


def _log_to_stderr(*, verbose: bool) -> None:
    import logging

    class Redacting(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return without_secrets(super().format(record))

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Redacting("ckptmgr: %(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler], force=True)
    logging.addLevelName(logging.WARNING, "warning")
    logging.addLevelName(logging.ERROR, "error")
    logging.addLevelName(logging.INFO, "info")
    if not verbose:
        handler.addFilter(logging.Filter("ckptmgr"))  # what a library says about its sockets is nobody's business


def _report(error: Exception) -> int:
    """Print the line of `error`, or its lines, and return its exit code."""
    from ckptmgr.core.errors import CkptmgrError

    if isinstance(error, CkptmgrError):
        for line in error.lines:
            fail(line)
        return error.exit_code
    if hasattr(error, "format_message"):  # what typer raises for a wrong command line, whichever click it carries
        return _report_usage(error)
    if isinstance(error, OSError) and error.errno and error.filename == STDOUT:
        _give_up_stdout()
        fail(f"cannot write to stdout: {error.strerror}")
        return 4
    if isinstance(error, OSError) and error.errno:
        from ckptmgr.backends.oserrors import translate_os_error

        return _report(translate_os_error(error, "use", os.fspath(error.filename or ".")))
    if type(error).__name__ == "Abort":
        fail("aborted")
        return 1
    fail(f"unexpected {type(error).__name__}: {error} - please report it with the output of -v")
    return 1


def _report_usage(error: Exception) -> int:
    """A wrong command line: one line and where to read on; without any word at all, the help itself."""
    context = getattr(error, "ctx", None)
    message = error.format_message()  # type: ignore[attr-defined]
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help(), file=sys.stderr)
        return 2
    path = context.command_path if context is not None else "ckptmgr"
    fail(f"{message.rstrip('.')} - see `{path} --help`")
    return 2


if __name__ == "__main__":
    main()
