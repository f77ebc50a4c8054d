"""Raises while it is imported."""

TABLE = {"a": 1}
VALUE = TABLE["b"]


class Engine:
    pass
