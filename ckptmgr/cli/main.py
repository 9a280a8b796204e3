"""`ckptmgr`: parse, call, print. Every error is one line on stderr and an exit code; tracebacks only with `-v`.

Exit codes: 0 done, 1 unexpected, 2 usage, 3 nothing to resume or not found, 4 store unavailable or refused, 5 damaged data,
6 uploads still pending, 7 conflict, 75 requeue, 130 and 143 signals.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import typer

from ckptmgr.cli import looking, moving, pruning, story
from ckptmgr.cli.output import fail

_EPILOG = "RUN is a run URL: s3://bucket/exp/run, oss://bucket/exp/run, or a directory. -v (anywhere) shows what happens, and tracebacks."

app = typer.Typer(
    name="ckptmgr",
    help="Checkpoints of PyTorch training: saved locally, uploaded on the side, resumed by one command.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for family in (story, looking, moving, pruning):
    family.register(app)


def main(argv: Sequence[str] | None = None) -> None:
    """The console script; ends the process with the exit code."""
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    options, command = _split_command(argv)
    verbose = any(option in ("-v", "--verbose") for option in options)
    options = [option for option in options if option not in ("-v", "--verbose")]
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="ckptmgr: %(levelname)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
    try:
        code = app(args=options, prog_name="ckptmgr", standalone_mode=False, obj=moving.Command(command))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our pipe has seen enough (`ckptmgr ls … | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        fail("interrupted")
        return 130
    except Exception as error:
        if verbose:
            logging.getLogger("ckptmgr").error("%s", type(error).__name__, exc_info=error)
        return _report(error)
    return code if isinstance(code, int) else 0


def _split_command(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """What stands before the first `--`, and the COMMAND after it; None when there is no `--`."""
    if "--" not in argv:
        return list(argv), None
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def _report(error: Exception) -> int:
    """Print the one line of `error`, and return its exit code."""
    from ckptmgr.core.errors import CkptmgrError

    if isinstance(error, CkptmgrError):
        fail(str(error))
        return error.exit_code
    if hasattr(error, "format_message"):  # what typer raises for a wrong command line, whichever click it carries
        fail(f"{error.format_message()} - see `ckptmgr --help`")
        return 2
    if type(error).__name__ == "Abort":
        fail("aborted")
        return 1
    fail(f"unexpected {type(error).__name__}: {error} - please report it with the output of -v")
    return 1


if __name__ == "__main__":
    main()
