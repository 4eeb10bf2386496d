"""Memory of a process that answers in time, and runs for months."""

import ctypes
import gc
import sys
import threading
import time

YOUNG = 20_000  # objects more than before: what they refer to is looked at
OLD_EVERY = 100  # of the looks at middle-aged objects, a look at all
GIVE_BACK_EVERY = 10.0  # seconds


def collect_seldom() -> None:
    """Leave aside what has been made so far, which stays, and look seldom at the rest.

    A look at all objects stops the event loop: 0.2 s with 250 live sessions and the usual settings, though it frees nothing.
    Nearly everything is freed by its reference count; what is not is still found. To be called
    again when what stayed was replaced.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, OLD_EVERY)
    give_back()


def give_back() -> None:
    """Give memory that the allocator holds and nobody uses back to the system: glibc itself does so only at the heap's end."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def give_back_often() -> None:
    """Give back memory every few seconds, in a thread of its own.

    Tensors and audio of all sizes leave holes between what stays: of a busy engine 50 MB in half a minute, and more with the
    hours. It takes 3 to 8 ms, in which others wait for the allocator.
    """

    def work() -> None:
        while True:
            time.sleep(GIVE_BACK_EVERY)
            give_back()

    threading.Thread(target=work, name="give-back-memory", daemon=True).start()
