"""Programs in which the host accesses memory that belongs to the device; each ends by SIGSEGV.

``python host_accesses.py MODE...`` runs each program in each mode, and prints one line of JSON with what became of
it. It forks for each program, because an import of PyTorch takes seconds. Forks are possible while no stream has a
thread.
"""

import faulthandler
import json
import os
import sys
import tempfile

# Each program with the text that the device prints first.
PROGRAMS = {
    "host reads device memory": (
        "print(ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[3])",
        "the host read memory of device 0",
    ),
    "host writes device memory": (
        "ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[3] = 1.0",
        "the host wrote memory of device 0",
    ),
    "host writes pinned memory below a copy": (
        "x.copy_(p, non_blocking=True); p[500] = 1",
        "the host wrote pinned memory that copy from the host (stream 0 of device 0",
    ),
    "host reads pinned memory below a copy": (
        "p.copy_(x, non_blocking=True); time.sleep(0.1); print(p[500])",
        "the host read pinned memory that copy to the host (stream 0 of device 0",
    ),
}


def run(program: str, mode: str) -> tuple[int, str]:
    """Run a program in a forked process; return how the process ended, and what it wrote to stderr."""
    with tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), 2)
            code = 1
            try:
                execute(program, mode)
                code = 0
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        return status, errors.read()


def execute(program: str, mode: str) -> None:
    import ctypes
    import time

    import torch
    from modes import mode_of

    torch.simdev.configure(mode_of(mode))
    x = torch.ones(1000, device="simdev")
    p = torch.zeros(1000).pin_memory()
    exec(program, {"ctypes": ctypes, "time": time, "x": x, "p": p})


if __name__ == "__main__":
    import torch  # noqa: F401  (loads the backend, before the forks)

    faulthandler.enable()
    ends = {
        name: {mode: run(program, mode) for mode in sys.argv[1:]} for name, (program, _) in PROGRAMS.items()
    }
    print(json.dumps(ends))
