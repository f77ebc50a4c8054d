"""Engines for ``runtime: python``; a fleet file names them as ``bulkhead.engines.NAME:CLASS``. See docs/engines.md."""
