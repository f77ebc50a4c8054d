"""All is said in pyproject.toml but what a wheel with the native programs has besides:
scripts/wheel puts them into programs/, beside this file, of a copy of this folder. This also stops
a build that would leave out what the package cannot do without."""

from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent

for name in ("wire.json", "worker_link.json", "control.json"):
    if not (HERE / "bulkhead" / name).is_file():
        raise FileNotFoundError(f"bulkhead/{name} is a link into ipc/ of the checkout, which is not here: "
                                "install from the checkout, or a wheel or source distribution made there")  # fmt: skip


def files_below(folder: str, target: str) -> dict[str, list[str]]:
    """By the folder in the environment where they are installed."""
    found: dict[str, list[str]] = {}
    for file in sorted((HERE / folder).rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            place = Path(target) / file.parent.relative_to(HERE / folder)
            found.setdefault(str(place), []).append(str(file.relative_to(HERE)))
    return found


if (HERE / "programs").is_dir():
    # The daemon gives any interpreter a copy of the package that lies beside nothing else.
    files = files_below("programs", "bin") | files_below("bulkhead", "share/bulkhead/python/bulkhead")
    setup(data_files=list(files.items()))
else:
    setup()
