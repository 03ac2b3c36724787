# The few commands of development: just <name>. `just --list` shows them.

export PIP_CONSTRAINT := justfile_directory() / "constraints/ci.txt"

# make the environment .venv with everything that development needs
setup:
    python3 -m venv .venv && .venv/bin/pip install --quiet -e ".[dev]"

# lint, format and types
check:
    .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

# format, and mend what the linter can
fix:
    .venv/bin/ruff check --fix . && .venv/bin/ruff format .

# the tests of the README's second command, or those that are named: just test tests/unit/wire
test *args:
    .venv/bin/python -m pytest -q -n 3 {{args}}

# the longer tests
slow *args:
    .venv/bin/python -m pytest -q -n 3 -m slow {{args}}

# write the tables of settings in docs/
tables:
    .venv/bin/python tests/settings_tables.py

# build the documentation site into site/
docs:
    .venv/bin/mkdocs build --strict --quiet -f .mkdocs.yml

# everything that CI does, in an environment of its own
ci:
    .ci/run
