"""The command line ``gtrain``. Nothing is imported before :func:`main` is called."""


def main() -> None:
    """Entry point of the command; ends the process with 0, or with what went wrong in a few lines."""
    from gtrain.cli import entry

    entry.main()
