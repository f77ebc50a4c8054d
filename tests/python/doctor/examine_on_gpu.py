"""One case of the corpus, by the fake run and by a real capture."""

from pathlib import Path
from typing import Any

from bulkhead.doctor import diagnose
from findings import cases


def examined(file: Path, name: str) -> dict[str, Any]:
    case = next(case for case in cases(file) if case.name == name)
    return diagnose(case.target, case.factory, gpu=True).document()
