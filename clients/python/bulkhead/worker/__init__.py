"""The worker of ``runtime: python``: one engine, in a process that the daemon starts
(``docs/python-engines.md``)."""
