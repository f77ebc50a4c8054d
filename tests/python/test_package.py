"""The package as it is built and looked at; tests/install installs it and uses it."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path

import bulkhead

SOURCE = Path(__file__).resolve().parents[2]
PACKAGE = SOURCE / "clients" / "python"


class Built(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        if importlib.util.find_spec("build") is None:
            raise unittest.SkipTest("the package `build` is not installed: scripts/install brings it")
        cls.folder = tempfile.TemporaryDirectory(prefix="bh-package-")
        cls.addClassCleanup(cls.folder.cleanup)
        tree = Path(cls.folder.name, "python")  # builds leave files behind: not in the checkout
        shutil.copytree(PACKAGE, tree, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist"))
        cls.dist = Path(cls.folder.name, "dist")
        # The source distribution, and the wheel from nothing but that.
        done = subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(cls.dist), str(tree)],
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        (cls.wheel,) = cls.dist.glob("*.whl")
        (cls.sdist,) = cls.dist.glob("*.tar.gz")

    def test_both_distributions_hold_what_is_needed(self) -> None:
        needed = {f"bulkhead/{name}" for name in ("__init__.py", "aio/__init__.py", "engines/declarations.json", "export/product_kernel.h", "py.typed",
                                                      "wire.json", "control.json", "comfyui_pack/__init__.py", "comfyui_pack/pyproject.toml")}  # fmt: skip
        with zipfile.ZipFile(self.wheel) as wheel:
            self.assertLessEqual(needed, set(wheel.namelist()))
            self.assertEqual(json.loads(wheel.read("bulkhead/wire.json")), json.loads((SOURCE / "ipc/channel/wire.json").read_text()))
            sources = {str(path.relative_to(PACKAGE)) for path in PACKAGE.glob("bulkhead/**/*.py")}
            self.assertLessEqual(sources, set(wheel.namelist()))
        with tarfile.open(self.sdist) as sdist:
            names = {member.name.split("/", 1)[1] for member in sdist.getmembers() if "/" in member.name}
            self.assertLessEqual(needed | {"README.md", "pyproject.toml"}, names)
            self.assertTrue(all(member.isfile() or member.isdir() for member in sdist.getmembers()), "a link leads out of it")

    def test_it_needs_nothing_and_is_pure(self) -> None:
        self.assertTrue(self.wheel.name.endswith("-py3-none-any.whl"))
        with zipfile.ZipFile(self.wheel) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            needs = [line for line in wheel.read(name).decode().splitlines() if line.startswith("Requires-Dist")]
        self.assertEqual([line for line in needs if "extra ==" not in line], [])


class Copied(unittest.TestCase):
    def test_a_copy_without_what_it_links_to_is_not_built(self) -> None:
        with tempfile.TemporaryDirectory(prefix="bh-package-") as folder:
            tree = Path(folder, "python")
            shutil.copytree(PACKAGE, tree, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist"))
            done = subprocess.run([sys.executable, str(tree / "setup.py"), "--version"], capture_output=True, text=True, cwd=tree)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("wire.json", done.stderr)
        done = subprocess.run([sys.executable, str(PACKAGE / "setup.py"), "--version"], capture_output=True, text=True, cwd=PACKAGE)
        self.assertEqual(done.returncode, 0, done.stderr)  # the checkout has it


class Looked(unittest.TestCase):
    def test_its_version_is_the_projects(self) -> None:
        said = re.search(r"project\(bulkhead VERSION (\S+)", (SOURCE / "CMakeLists.txt").read_text())
        assert said is not None
        self.assertEqual(bulkhead.__version__, said[1])
        self.assertTrue((PACKAGE / "bulkhead" / "wire.json").samefile(SOURCE / "ipc/channel/wire.json"), "the layout exists once")

    def test_all_that_is_public_says_what_it_does(self) -> None:
        for module in (bulkhead, bulkhead.aio):
            self.assertTrue(module.__doc__)
            for name in module.__all__:
                one = getattr(module, name)
                self.assertTrue(inspect.getdoc(one), name)
                for member, value in vars(one).items() if inspect.isclass(one) else ():
                    plain = value.fget if isinstance(value, property) else value
                    if not member.startswith("_") and inspect.isfunction(plain):
                        self.assertTrue(inspect.getdoc(plain), f"{module.__name__}.{name}.{member} has no docstring")

    def test_it_can_be_imported_without_numpy(self) -> None:
        code = "import sys; sys.modules['numpy'] = sys.modules['torch'] = None; import bulkhead"
        subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    unittest.main()
