"""The pack as a folder: what the registry takes of it, and how it gets into ComfyUI and out again."""

from __future__ import annotations

import contextlib
import io
import subprocess
import tempfile
import tomllib
import unittest
from pathlib import Path

import bulkhead
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

    def test_what_is_not_ours_is_left_alone(self) -> None:
        self.target.mkdir()
        (self.target / "theirs.py").touch()
        for does in ("install", "uninstall"):
            status, text = run(does, str(self.comfyui))
            self.assertEqual(status, 1)
            self.assertIn("was not made by this command", text)
        self.assertTrue((self.target / "theirs.py").exists())

    def test_a_folder_without_comfyui_is_refused(self) -> None:
        status, text = run("install", str(self.comfyui / "custom_nodes"))
        self.assertEqual(status, 1)
        self.assertIn("main.py", text)


class Registry(unittest.TestCase):
    def test_what_the_registry_takes(self) -> None:
        """No links and no compiled files; a name without ComfyUI in it; a version of three numbers; a publisher."""
        folder = CLIENTS / "comfyui"
        told = tomllib.loads((folder / "pyproject.toml").read_text())
        self.assertRegex(told["project"]["name"], r"^[a-z][a-z0-9]*([-_.][a-z0-9]+)*$")
        self.assertRegex(told["project"]["version"], r"^\d+\.\d+\.\d+$")
        self.assertTrue(told["tool"]["comfy"]["PublisherId"])
        client = tomllib.loads((CLIENTS / "python" / "pyproject.toml").read_text())
        self.assertEqual(told["project"]["dependencies"], [client["project"]["name"]])
        self.assertEqual(bulkhead.__version__, told["project"]["version"])
        self.assertEqual([path for path in folder.rglob("*") if path.is_symlink()], [])
        tracked = subprocess.run(["git", "ls-files", str(folder)], cwd=folder, capture_output=True, text=True, check=True).stdout
        self.assertNotRegex(tracked, r"\.pyc|__pycache__")


if __name__ == "__main__":
    unittest.main()
