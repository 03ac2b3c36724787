"""``gtrain report RUN... [output=FILE] [files=svg]``: checks its arguments and writes a page."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gtrain.errors import GtrainError
from gtrain.record.run import find_runs

PAGE = "report.html"
FILES = ("svg", "png", "none")


def main(arguments: list[str]) -> None:
    """Run the command.

    Args:
        arguments: folders of runs or sweeps, ``output=FILE`` and ``files=svg``, ``png`` or ``none``.

    Raises:
        GtrainError: no folder was given, one has no run, or a package is missing.
    """
    options = {"output": "", "files": "svg"}
    folders = take_options(arguments, options)
    if not folders:
        raise GtrainError("gtrain report was given without a run.", hint="gtrain report runs/<date>/<time>")
    if options["files"] not in FILES:
        raise GtrainError(f"files={options['files']} was set.", hint=f"the forms are {', '.join(FILES)}.")
    page = write_report(folders, Path(options["output"]) if options["output"] else None, options["files"])
    print(f"report: {page}")


def take_options(arguments: list[str], options: dict[str, str]) -> list[Path]:
    """Set those of ``options`` that ``arguments`` give as ``key=value``, and return the other arguments as folders."""
    folders = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in options:
            options[key] = value
        else:
            folders.append(Path(argument))
    return folders


def check_installed() -> None:
    """Raise unless the packages of the extra ``report`` are installed.

    Raises:
        GtrainError: a package is missing.
    """
    missing = [name for name in ("altair", "vl_convert", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise GtrainError(
            f"a report needs {' and '.join(missing)}, which is not installed.", hint="pip install 'gtrain[report]'"
        )


def write_report(folders: list[Path], output: Path | None = None, files: str = "svg") -> Path:
    """Write the page of a run, or the comparison of several, and return its path.

    Args:
        folders: of runs or sweeps.
        output: the page; None: ``report.html`` in the first folder.
        files: format of the figures beside the page, in a folder of its name; ``none`` for none.

    Raises:
        GtrainError: a folder has no run, or a package is missing.
    """
    check_installed()
    runs = find_runs(folders)
    path = output or folders[0] / PAGE
    # Imported after the check.
    from gtrain.reporting.comparison import write_comparison
    from gtrain.reporting.page import write_files
    from gtrain.reporting.run_page import write_run_page

    figures = write_run_page(runs[0], path) if len(runs) == 1 else write_comparison(runs, path)
    if files != "none":
        write_files(path.with_name(f"{path.stem}-figures"), figures, files)
    return path
