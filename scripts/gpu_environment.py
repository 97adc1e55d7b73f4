"""Print the GPU of this machine and the versions of related software as one line of JSON."""

import importlib.metadata
import json
import os
import platform
import subprocess

PACKAGES = (
    "bitsandbytes",
    "torchao",
    "peft",
    "liger-kernel",
    "cut-cross-entropy",
    "deepspeed",
    "triton",
    "pytest",
    "expecttest",
)


def first_line(*command: str) -> str | None:
    """Return the first line that a command prints, or None if the command is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    data: dict[str, object] = {"python": platform.python_version(), "torch": None, "gpu": None}
    try:
        import torch
    except ImportError:
        print(json.dumps(data))
        return
    data["torch"] = torch.__version__
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        data |= {
            "gpu": torch.cuda.get_device_name(0),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": total,
            "memory_free_bytes": free,
            "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "torch_cuda": torch.version.cuda,
            "cores": len(os.sched_getaffinity(0)),
            "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "packages": versions(),
        }
    print(json.dumps(data))


if __name__ == "__main__":
    main()
