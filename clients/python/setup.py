"""All is said in pyproject.toml; this stops a build that would leave out what the package cannot do without."""

from pathlib import Path

from setuptools import setup

if not (Path(__file__).parent / "bulkhead" / "wire.json").is_file():
    raise FileNotFoundError("bulkhead/wire.json is a link to ipc/channel/wire.json of the checkout, which is not here: "
                            "install from the checkout, or a wheel or source distribution made there")  # fmt: skip
setup()
