"""Functions of a package are compiled in processes of their own: what comes back of each, and what
is left when one fails."""

from __future__ import annotations

import os
import signal
import unittest

import torch
from bulkhead.errors import Error
from bulkhead.export.side_by_side import Constants, Task, compiled


class SideBySide(unittest.TestCase):
    def setUp(self) -> None:
        self.layer = torch.nn.Linear(3, 2)
        self.finished: list[str] = []

    def run_tasks(self, *tasks: Task) -> dict[str, Constants]:
        return compiled(list(tasks), [self.layer], lambda name, seconds: self.finished.append(name))

    def test_the_models_tensors_come_back_themselves_and_others_as_copies(self) -> None:
        """Else weights that functions share would be in the package once for each."""
        made = Task("made", lambda: {"angle": torch.arange(3, dtype=torch.bfloat16), "weight": self.layer.weight.detach()})
        part = Task("part", lambda: {"row": self.layer.weight[1]})
        done = self.run_tasks(made, part)
        self.assertEqual(done["made"]["weight"].data_ptr(), self.layer.weight.data_ptr())
        torch.testing.assert_close(done["made"]["angle"], torch.arange(3, dtype=torch.bfloat16))
        torch.testing.assert_close(done["part"]["row"], self.layer.weight[1].detach())

    def test_they_are_in_order_whoever_ends_first(self) -> None:
        read, written = os.pipe()
        slow = Task("slow", lambda: {"x": torch.tensor([ord(os.read(read, 1))])})
        fast = Task("fast", lambda: {"x": torch.tensor([os.write(written, b"!")])})
        self.assertEqual(list(self.run_tasks(slow, fast)), ["slow", "fast"])
        self.assertEqual(sorted(self.finished), ["fast", "slow"])

    def test_more_than_there_are_cpus(self) -> None:
        tasks = [Task(str(i), lambda i=i: {"x": torch.tensor([i])}) for i in range(3 * len(os.sched_getaffinity(0)) + 3)]
        self.assertEqual({name: int(said["x"]) for name, said in self.run_tasks(*tasks).items()}, {task.name: i for i, task in enumerate(tasks)})

    def test_kernels_are_written_for_the_threads_of_this_process(self) -> None:
        import torch._inductor.utils

        here = torch._inductor.utils.parallel_num_threads()
        there = self.run_tasks(Task("threads", lambda: {"x": torch.tensor([torch._inductor.utils.parallel_num_threads(), torch.get_num_threads()])}))
        self.assertEqual(there["threads"]["x"].tolist(), [here, 1])

    def test_the_first_error_ends_the_others(self) -> None:
        read, self_written = os.pipe()  # nothing is ever written
        self.addCleanup(os.close, self_written)

        def refuses() -> Constants:
            raise Error("input_invalid", "compiling it", "another")

        with self.assertRaises(Error) as raised:
            self.run_tasks(Task("waits", lambda: {"x": torch.tensor(os.read(read, 1)[0])}), Task("refuses", refuses))
        self.assertEqual((raised.exception.code, raised.exception.remedy), ("input_invalid", "another"))
        with self.assertRaises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)

    def test_any_other_failure_tells_where(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "compiling broken[^$]*ZeroDivisionError"):
            self.run_tasks(Task("broken", lambda: {"x": torch.tensor(1 // 0)}))

    def test_a_process_that_is_killed_is_named(self) -> None:
        with self.assertRaisesRegex(Error, "big.pt2"):
            self.run_tasks(Task("big.pt2", lambda: os.kill(os.getpid(), signal.SIGKILL) or {}))


if __name__ == "__main__":
    unittest.main()
