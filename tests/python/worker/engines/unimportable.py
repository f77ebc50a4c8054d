"""Needs what no venv has."""

import no_such_module  # type: ignore[import-not-found]  # noqa: F401


class Engine:
    pass
