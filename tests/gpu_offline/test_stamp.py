"""What is compiled without a GPU is kept until what makes it changes: no stale package is carried
to a GPU, and no current one is compiled again."""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import packages  # noqa: E402
import requirements  # noqa: E402


class Stamp(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="bh-stamp-")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.exporter = self.root / "clients" / "python" / "bulkhead" / "export"
        (self.exporter / "families").mkdir(parents=True)
        self.source = self.root / "models.py"
        self.files = [self.source, self.exporter / "make.py", self.exporter / "product_kernel.h", self.exporter / "families" / "causal_lm.py"]
        for file in self.files:
            file.write_text("before")
        self.versions = dict.fromkeys(requirements.PACKAGES, "1.0")
        for patch in (
            mock.patch.object(requirements, "ROOT", self.root),
            mock.patch.object(requirements.importlib.metadata, "version", self.versions.__getitem__),
            mock.patch.object(packages, "SOURCES", (self.source,)),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def changes(self) -> list[tuple[str, object]]:
        return [
            *((file.name, lambda file=file: file.write_text("after")) for file in self.files),
            *((name, lambda name=name: self.versions.update({name: "1.1"})) for name in self.versions),
        ]

    def test_whatever_decides_what_is_compiled_changes_it(self) -> None:
        seen = {requirements.stamp(self.source)}
        for name, change in self.changes():
            change()
            self.assertNotIn(requirements.stamp(self.source), seen, name)
            seen.add(requirements.stamp(self.source))

    def test_a_package_is_compiled_when_it_has_changed(self) -> None:
        exported: list[str] = []

        def export(name: str, folder: Path) -> str:
            exported.append(name)
            (folder / name).mkdir()  # which fails where an older one was left
            return "done"

        with mock.patch.object(packages, "export", export):
            packages.made("int8", self.root)
            packages.made("int8", self.root)
            self.assertEqual(exported, ["int8"])
            for name, change in self.changes():
                change()
                packages.made("int8", self.root)
                packages.made("int8", self.root)
            self.assertEqual(len(exported), 1 + len(self.changes()))

    def test_nothing_is_left_of_one_that_fails(self) -> None:
        def fails(name: str, folder: Path) -> str:
            (folder / name).mkdir()
            raise RuntimeError("no such operator")

        with mock.patch.object(packages, "export", lambda name, folder: (folder / name).mkdir() or "done"):
            packages.made("int8", self.root)
        self.source.write_text("after")
        with mock.patch.object(packages, "export", fails), self.assertRaises(RuntimeError):
            packages.made("int8", self.root)
        self.assertFalse((self.root / "int8").exists(), "neither the part that was made, nor the older one, which would be carried")


if __name__ == "__main__":
    unittest.main()
