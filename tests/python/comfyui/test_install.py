"""The pack as a folder: what the registry takes of it, and how it gets into ComfyUI
and out again."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import tempfile
import tomllib
import unittest
from pathlib import Path
from unittest import mock

import bulkhead
from bulkhead import comfyui
from bulkhead.__main__ import main
from pack import CLIENTS


def run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(["comfyui", *arguments])
    return status, out.getvalue()


class Install(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="bh-")
        self.addCleanup(folder.cleanup)
        self.comfyui = Path(folder.name)
        (self.comfyui / "custom_nodes").mkdir()
        (self.comfyui / "main.py").touch()
        self.target = self.comfyui / "custom_nodes" / "bulkhead"

    def test_in_again_and_out(self) -> None:
        status, text = run("install", str(self.comfyui))
        self.assertEqual((status, text.split()[0]), (0, "made"), text)
        for needed in ("__init__.py", "pyproject.toml", "patcher.py"):
            self.assertTrue((self.target / needed).is_file(), needed)
        self.assertEqual([path for path in self.target.rglob("*") if path.is_symlink() or path.name == "__pycache__"], [])
        (self.target / "left_from_an_earlier_release.py").touch()
        self.assertIn("replaced", run("install", str(self.comfyui))[1])
        self.assertFalse((self.target / "left_from_an_earlier_release.py").exists())
        self.assertEqual(run("uninstall", str(self.comfyui))[0], 0)
        self.assertEqual(list((self.comfyui / "custom_nodes").iterdir()), [])
        self.assertIn("nothing was done", run("uninstall", str(self.comfyui))[1])

    def test_workflows_are_in_the_format_that_templates_open(self) -> None:
        """ComfyUI lists those of this folder. Its page opens templates as it saved them: it reads a
        prompt only where that is dropped."""
        for path in sorted((comfyui.PACK / "example_workflows").glob("*.json")):
            with self.subTest(path.name):
                saved = json.loads(path.read_text())
                nodes = {node["id"]: node for node in saved["nodes"]}
                self.assertEqual((saved["version"], saved["last_node_id"], saved["last_link_id"]), (0.4, max(nodes), len(saved["links"])))
                for number, source, output, target, place, _ in saved["links"]:
                    self.assertIn(number, nodes[source]["outputs"][output]["links"])
                    self.assertEqual(nodes[target]["inputs"][place]["link"], number)

    def test_compiled_files_stay_where_they_are(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            pack = Path(shutil.copytree(comfyui.PACK, Path(folder, "pack")))
            (pack / "example_workflows" / "__pycache__").mkdir()
            for place in (pack / "example_workflows" / "__pycache__", pack):
                (place / "manager.cpython-311.pyc").touch()
            with mock.patch.object(comfyui, "PACK", pack):
                self.assertEqual(run("install", str(self.comfyui))[0], 0)
        self.assertEqual([path for path in self.target.rglob("*") if path.suffix == ".pyc" or path.name == "__pycache__"], [])

    def test_what_is_not_ours_is_left_alone(self) -> None:
        self.target.mkdir()
        (self.target / "theirs.py").touch()
        for does in ("install", "uninstall"):
            status, text = run(does, str(self.comfyui))
            self.assertEqual(status, 1)
            self.assertIn("was not made by this command", text)
        self.assertTrue((self.target / "theirs.py").exists())

    def test_a_folder_that_cannot_be_written_is_told(self) -> None:
        run("install", str(self.comfyui))
        for does, fails in (("install", "comfyui.shutil.copytree"), ("install", "comfyui._remove"), ("uninstall", "comfyui._remove")):
            with self.subTest(does, fails=fails), mock.patch(f"bulkhead.{fails}", side_effect=PermissionError(13, "Permission denied")):
                status, text = run(does, str(self.comfyui))
                self.assertEqual(status, 1)
                self.assertIn(f"writing {self.target}: [Errno 13] Permission denied", text)
            self.assertEqual(list((self.comfyui / "custom_nodes").iterdir()), [self.target])
            self.assertTrue((self.target / "pyproject.toml").is_file())

    def test_a_folder_without_comfyui_is_refused(self) -> None:
        status, text = run("install", str(self.comfyui / "custom_nodes"))
        self.assertEqual(status, 1)
        self.assertIn("main.py", text)


class Registry(unittest.TestCase):
    folder = CLIENTS / "comfyui"

    def test_its_description_keeps_to_the_registrys_rules(self) -> None:
        """Those of the registry's specification, but for the address of the repository: the
        project has none yet."""
        told = tomllib.loads((self.folder / "pyproject.toml").read_text())
        project, comfy = told["project"], told["tool"]["comfy"]
        self.assertLess(len(project["name"]), 100)
        self.assertRegex(project["name"], r"^[A-Za-z][A-Za-z0-9]*([-_.][A-Za-z0-9]+)*$")
        self.assertNotIn("comfyui", project["name"].lower())
        self.assertEqual([number.isdecimal() for number in project["version"].split(".")], [True] * 3)
        self.assertLessEqual({"PublisherId", "DisplayName"}, set(comfy))
        self.assertLessEqual(set(comfy), {"PublisherId", "DisplayName", "Icon", "Banner", "Models", "includes", "requires-comfyui"})
        self.assertTrue(all(isinstance(value, str) and value for value in (project["description"], *comfy.values())))
        self.assertIn("Operating System :: POSIX :: Linux", project["classifiers"])
        client = tomllib.loads((CLIENTS / "python" / "pyproject.toml").read_text())["project"]
        self.assertEqual(project["dependencies"], [client["name"]])
        self.assertEqual((project["version"], project["requires-python"]), (bulkhead.__version__, client["requires-python"]))
        # What is published is what git has: no links, no compiled files.
        names = subprocess.run(["git", "ls-files"], cwd=self.folder, capture_output=True, text=True, check=True).stdout.splitlines()
        self.assertLessEqual({"__init__.py", "pyproject.toml", "README.md"}, set(names))
        self.assertEqual([name for name in names if (self.folder / name).is_symlink() or Path(name).suffix not in (".py", ".json", ".toml", ".md")], [])


if __name__ == "__main__":
    unittest.main()
