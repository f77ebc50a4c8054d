"""Synchronisation, streams, and host memory that the driver allocates."""

import torch


def timed(x):
    y = x @ x
    torch.cuda.synchronize()  # finds: sync
    return y


def stream_waited(x):
    y = x * 2
    torch.cuda.current_stream().synchronize()  # finds: sync
    return y


def event_waited(x):
    done = torch.cuda.Event()
    y = x * 2
    done.record()
    done.synchronize()  # finds: sync
    return y


def side_stream(x, side):
    with torch.cuda.stream(side):  # finds: sync
        y = x * 2
    return y


def cache_emptied(x):
    y = x * 2
    torch.cuda.empty_cache()  # finds: sync
    return y


def staged_in_pinned(x):
    staging = torch.empty(4, pin_memory=True)  # finds: sync
    return x * 2, staging



def joined_too_early(x, side):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # finds: sync
        y = x * 2
        done = side.record_event()
        y = y * 3
    torch.cuda.current_stream().wait_event(done)
    return y


def forked_from_nobody(x, side, other):
    other.wait_stream(side)
    with torch.cuda.stream(other):  # finds: sync
        y = x * 2
    torch.cuda.current_stream().wait_stream(other)
    return y


def stream_set(x, side):
    torch.cuda.set_stream(side)  # finds: sync
    return x * 2


def stream_entered(x, side):
    with side:  # finds: sync
        return x * 2


CASES = {
    "timed": lambda device: (torch.randn(4, 4, device=device),),
    "stream_waited": lambda device: (torch.randn(4, device=device),),
    "event_waited": lambda device: (torch.randn(4, device=device),),
    "side_stream": lambda device: (torch.randn(4, device=device), torch.cuda.Stream(device)),
    "cache_emptied": lambda device: (torch.randn(4, device=device),),
    "staged_in_pinned": lambda device: (torch.randn(4, device=device),),
    "joined_too_early": lambda device: (torch.randn(4, device=device), torch.cuda.Stream(device)),
    "forked_from_nobody": lambda device: (torch.randn(4, device=device), torch.cuda.Stream(device), torch.cuda.Stream(device)),
    "stream_set": lambda device: (torch.randn(4, device=device), torch.cuda.Stream(device)),
    "stream_entered": lambda device: (torch.randn(4, device=device), torch.Stream(device)),
}
