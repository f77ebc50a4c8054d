"""What a step does in threads that it starts."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

POOL = ThreadPoolExecutor(1)


def read_in_thread(x):
    kept = []

    def ask():
        kept.append(x.max().item())  # finds: host_read sync

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return x / kept[0]


class Reader(threading.Thread):
    def __init__(self, x):
        super().__init__(daemon=True)
        self.x, self.text = x, ""

    def run(self):
        self.text = f"{self.x}"  # finds: host_read


def read_in_own_kind_of_thread(x):
    reader = Reader(x)
    reader.start()
    reader.join()
    return x * len(reader.text)


def not_waited_for(x):
    threading.Thread(target=print, args=(x,)).start()  # finds: host_read
    return x * 2


def read_by_executor(x):
    with ThreadPoolExecutor(2) as pool:
        return x * pool.submit(float, x.mean()).result()  # finds: host_read


def read_by_executor_of_module(x):
    largest = POOL.submit(lambda: torch.amax(x).tolist())  # finds: host_read sync
    return x / largest.result()


def rows_by_executor(x):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda row: row.numpy(), x.unbind()))  # finds: host_read


def peak(x):
    return x.cpu().max()  # finds: host_read


def read_beside_a_loop(x):
    return x * asyncio.run(asyncio.to_thread(peak, x)).item()


def computed_in_thread(x, result):
    def compute():
        with torch.no_grad():
            y = x * 2  # finds: sync
            result.copy_(y)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return result + 1


def tempered_in_thread(logits, temperature):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: logits / temperature).result()  # finds: sync baked_constant


def thread_of_the_host(x):
    sizes = []
    thread = threading.Thread(target=lambda: sizes.append(x.shape[0] * torch.ones(3).sum().item()))
    thread.start()
    thread.join()
    return x * len(sizes)


def thread_on_the_stream_of_the_step(x):
    stream, made = torch.cuda.current_stream(), []

    def compute():
        with torch.cuda.stream(stream):
            made.append(x * 2)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return made[0] + 1


CASES = {
    "read_in_thread": lambda device: (torch.rand(4, device=device),),
    "read_in_own_kind_of_thread": lambda device: (torch.rand(4, device=device),),
    "not_waited_for": lambda device: (torch.rand(4, device=device),),
    "read_by_executor": lambda device: (torch.rand(4, device=device),),
    "read_by_executor_of_module": lambda device: (torch.rand(4, device=device),),
    "rows_by_executor": lambda device: (torch.rand(3, 4, device=device),),
    "read_beside_a_loop": lambda device: (torch.rand(4, device=device),),
    "computed_in_thread": lambda device: (torch.rand(4, device=device), torch.zeros(4, device=device)),
    "tempered_in_thread": lambda device: (torch.rand(4, device=device), 0.7),
    "thread_of_the_host": lambda device: (torch.rand(4, device=device),),
    "thread_on_the_stream_of_the_step": lambda device: (torch.rand(4, device=device),),
}
