#!/usr/bin/env python3
"""Run all checks that need a GPU: build, tests, benchmarks, emulator, compute-sanitizer.

The step "emulator" compares the results of the CPU emulator of CUDA kernels with those of the GPU. The script
uses the Python interpreter that runs it, which must have PyTorch with CUDA. It installs nothing, and reports
each step that it skips. It builds into build-gpu/ for the GPU of this machine. With SHOESTRING_PREBUILT=DIR
it uses libraries that were built elsewhere; DIR is a build folder or an install prefix. It writes the results
to benchmarks/results/<gpu>.json. Exit status: 0 if no step failed, 1 if a step failed, 2 if there is no GPU.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from steps import Failed, Runner, Skipped, Step

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("libshoestring.so", "libshoestring_cuda.so", "build.json")
EMULATOR = "libshoestring_simt.so"
PRIMITIVES = "cuda_primitives_tests"
# a library for tests that makes transfers of offloaded memory late, or lets them fail
FAULTS = "liboffload_faults.so"
# Kernels in which only lane 0 arrives at a barrier in shared memory, after a __syncwarp that orders the accesses of
# the other lanes before it. racecheck does not follow this order, and reports a hazard for each of these accesses.
# The emulator follows it.
UNORDERED = ("key_gradients",)
# Suites that run first, because they use the instructions that only a GPU can prove.
RISKY = ("test_attention_hopper", "test_attention", "test_pack_sequences", "test_attention_mixed")


def widen_path() -> None:
    """Append to PATH the folders of this Python (where pip puts cmake and ninja) and of the CUDA toolkit."""
    homes = [os.environ[v] for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    folders = [str(Path(sys.executable).parent), *(f"{home}/bin" for home in (*homes, "/usr/local/cuda"))]
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])


def _path(folder: Path) -> str:
    """Return the value of PYTHONPATH with ``folder`` put first."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


class Check:
    """The steps of the GPU check, and the results that the steps collect."""

    def __init__(self, runner: Runner, build: Path, environment: dict) -> None:
        self.runner = runner
        self.build_folder = build
        # Folder of a copy of the Python package. The check installs its libraries there, so that those in the
        # source folder stay unchanged.
        self.package = build / "python/shoestring"
        # The variable SIMT_CAPABILITY makes the CPU emulator of CUDA run the kernels that host code selects
        # for a GPU of this compute capability.
        self.env = {
            "PYTHONPATH": _path(self.package.parent),
            "SHOESTRING_BUILD": str(build),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "SIMT_CAPABILITY": environment["capability"].replace(".", ""),
        }
        self.gpu = environment
        self.data: dict = {
            "machine": f"{environment['gpu']}, CUDA {environment['torch_cuda']}",
            "torch": environment["torch"],
            "date": datetime.date.today().isoformat(),
            "environment": environment,
            "suite": {},
            "emulator": [],
            "limits": {},
            "sanitizer": {},
            "benchmarks": [],
        }

    def steps(self) -> list[Step]:
        suites = [
            p for p in sorted((ROOT / "tests/python").glob("*/test_*.py")) if "mark.device" in p.read_text()
        ]
        return [
            Step("environment", self.environment, 10),
            Step("build", self.build, 420),
            # These steps mostly wait for the host, so they run side by side. What is riskiest starts first.
            Step("primitives", self.primitives, 90, "build", together=True),
            Step("emulator", self.emulator, 120, "build", together=True),
            *(
                Step(f"suite {p.stem}", lambda p=p: self.suite(p), 150, "build", together=True)
                for p in sorted(suites, key=lambda p: (p.stem not in RISKY, p.stem))
            ),
            *(
                Step(name, lambda name=name: self.sanitizer(name), 150, "build", together=True)
                for name in ("memcheck", "racecheck", "synccheck")
            ),
            Step("limits", self.limits, 60),
            *(
                Step(
                    p.stem,
                    lambda p=p: self.benchmark(p),
                    200 if p.stem == "bench_attention" else 100,
                    "build",
                )
                for p in sorted((ROOT / "benchmarks").glob("*/bench_*.py"))
            ),
        ]

    def environment(self) -> str:
        gpu = self.gpu
        nvcc = self.runner.command(["nvcc", "--version"]) if shutil.which("nvcc") else ""
        gpu["toolkit"] = found[1] if (found := re.search(r"release ([\d.]+)", nvcc)) else None
        gpu["not_found"] = [
            name for name in ("nvcc", "cmake", "ninja", "compute-sanitizer") if not shutil.which(name)
        ]
        packages = ", ".join(f"{name} {version}" for name, version in gpu["packages"].items())
        free, total = (gpu[name] / 2**30 for name in ("memory_free_bytes", "memory_bytes"))
        return (
            f"{gpu['gpu']}, capability {gpu['capability']}, driver {gpu['driver']}, toolkit {gpu['toolkit']}, "
            f"PyTorch {gpu['torch']}, {free:.1f} of {total:.1f} GiB free, {gpu['cores']} cores; "
            f"{packages or 'no peers'}; not found: {', '.join(gpu['not_found']) or 'nothing'}"
        )

    def build(self) -> str:
        shutil.rmtree(self.package, ignore_errors=True)
        shutil.copytree(
            ROOT / "python/shoestring",
            self.package,
            ignore=shutil.ignore_patterns("lib", "include", "share", "__pycache__"),
        )
        if prebuilt := os.environ.get("SHOESTRING_PREBUILT"):
            return self._take(Path(prebuilt))
        if shutil.which("nvcc") is None or shutil.which("cmake") is None:
            raise Failed(
                "nvcc, cmake: expected both on the PATH, or SHOESTRING_PREBUILT=DIR with libraries built "
                "elsewhere"
            )
        capability = self.gpu["capability"].replace(".", "")
        architecture = "90a" if capability == "90" else capability
        # Each compiler process needs up to 1.5 GiB of memory.
        jobs = max(1, min(self.gpu["cores"], self.gpu["ram_bytes"] // (3 << 29)))
        new = not (self.build_folder / "CMakeCache.txt").exists()
        launchers = [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("CXX", "CUDA")]
        self.runner.command(
            [
                "cmake",
                "-S",
                ROOT,
                "-B",
                self.build_folder,
                *(["-G", "Ninja"] if new and shutil.which("ninja") else []),
                f"-DPython3_EXECUTABLE={sys.executable}",
                f"-DCMAKE_CUDA_COMPILER={shutil.which('nvcc')}",
                "-DSHOESTRING_CUDA=1",
                f"-DSHOESTRING_CUDA_ARCHITECTURES={architecture}",
                "-DSHOESTRING_TESTS=ON",
                *(launchers if shutil.which("ccache") else []),
            ]
        )
        self.runner.command(
            [
                "cmake",
                "--build",
                self.build_folder,
                "--parallel",
                jobs,
                "--target",
                "shoestring",
                "shoestring_cuda",
                "shoestring_monitor",
                "offload_faults",
            ]
        )
        self.runner.command(["cmake", "--install", self.build_folder, "--prefix", self.package])
        return f"for {architecture}, {jobs} jobs"

    def _take(self, folder: Path) -> str:
        places = dict.fromkeys(LIBRARIES, self.package / "lib")
        tests = self.build_folder / "tests"
        places |= {EMULATOR: tests / "simt", PRIMITIVES: tests / "cuda", FAULTS: tests / "cpp"}
        for name, place in places.items():
            place.mkdir(parents=True, exist_ok=True)
            (place / name).unlink(missing_ok=True)
            found = next((path for path in folder.rglob(name) if path.is_file()), None)
            if found is not None:
                shutil.copy(found, place)
            elif name in LIBRARIES:
                raise Failed(f"SHOESTRING_PREBUILT: expected {name} somewhere in it, received {folder}")
        if json.loads((self.package / "lib/build.json").read_text())["cuda"] is None:
            raise Failed(f"SHOESTRING_PREBUILT: expected a build with CUDA, received {folder}")
        return "prebuilt libraries"

    def suite(self, file: Path) -> str:
        if "pytest" not in self.gpu["packages"]:
            raise Skipped(f"{sys.executable} has no pytest")
        journal = self.runner.logs / f"{file.stem}.jsonl"
        journal.unlink(missing_ok=True)
        without = [] if "expecttest" in self.gpu["packages"] else ["-k", "not opcheck"]
        cases: dict[str, dict] = {}
        reason: Failed | None = None
        # A test that hangs or crashes ends pytest. Another pytest then runs the tests that are left.
        while True:
            known, reason = len(cases), None
            try:
                self.runner.command(
                    [
                        sys.executable,
                        "-m",
                        "pytest",
                        "--backend=cuda",
                        file,
                        *without,
                        f"--journal={journal}",
                    ],
                    self.env,
                    ok=(0, 1, 5),  # 1: a test failed; 5: no test is left
                )
            except Failed as error:
                reason = error
            lines = journal.read_text().splitlines() if journal.exists() else []
            cases = {case["test"].partition("::")[2]: case for case in map(json.loads, lines)}
            if len(cases) == known or (all("outcome" in case for case in cases.values()) and not reason):
                break
            for case in cases.values():
                if "outcome" not in case:
                    case |= {"outcome": "failed", "message": "it ended the process, or took too long"}
                    with journal.open("a") as text:
                        text.write(json.dumps(case) + "\n")
        if not cases and reason:
            raise reason
        found = {
            outcome: [
                {"test": name, "message": case.get("message", "").split("\n")[0]}
                for name, case in cases.items()
                if case["outcome"] == outcome
            ]
            for outcome in ("passed", "failed", "skipped")
        }
        passed, failures, skipped = (found[outcome] for outcome in ("passed", "failed", "skipped"))
        self.data["suite"][file.stem] = {
            "passed": len(passed),
            "failed": len(failures),
            "skipped": skipped,
            "failures": failures,
        }
        counts = f"{len(passed)} passed, {len(failures)} failed, {len(skipped)} skipped" + (
            "; opcheck left out: expecttest is not installed" if without else ""
        )
        if failures:
            raise Failed(f"{counts}; {failures[0]['test']}: {failures[0]['message']}")
        if reason:
            raise Failed(f"{counts}; {reason}")
        if not passed:
            raise Skipped(skipped[0]["message"] if skipped else "no test is marked for it")
        return counts

    def primitives(self) -> str:
        program = self.build_folder / "tests/cuda" / PRIMITIVES
        if (self.build_folder / f"tests/cuda/CMakeFiles/{PRIMITIVES}.dir").exists() and not os.environ.get(
            "SHOESTRING_PREBUILT"
        ):
            self.runner.command(
                [
                    "cmake",
                    "--build",
                    self.build_folder,
                    "--parallel",
                    self.gpu["cores"],
                    "--target",
                    PRIMITIVES,
                ]
            )
        if not program.exists():
            raise Skipped("Catch2 was not found, and SHOESTRING_PREBUILT has no " + PRIMITIVES)
        return next(
            line for line in reversed(self.runner.command([program]).splitlines()) if line.strip("= ")
        )

    def emulator(self) -> str:
        library = self.build_folder / "tests/simt" / EMULATOR
        if "SHOESTRING_PREBUILT" not in os.environ:
            self.runner.command(
                [
                    "cmake",
                    "--build",
                    self.build_folder,
                    "--parallel",
                    self.gpu["cores"],
                    "--target",
                    "shoestring_simt",
                ]
            )
        if not library.exists():
            raise Skipped(f"{library} is not there")
        script, results = ROOT / "tests/python/emulator_cases.py", []
        for backend in ("simt", "cuda"):
            results.append(self.runner.logs / f"emulator-{backend}.pt")
            self.runner.command([sys.executable, script, "run", backend, results[-1]], self.env)
        rows = json.loads(
            self.runner.command([sys.executable, script, "compare", *results], self.env).splitlines()[-1]
        )
        self.data["emulator"] = rows
        wrong = [row for row in rows if not row["ok"]]
        summary = f"{len(rows)} tensors, {sum(row['error'] == 0 for row in rows)} of them bitwise equal"
        if wrong:
            raise Failed(
                f"{summary}; {len(wrong)} differ by more than allowed, first: {json.dumps(wrong[0])}"
            )
        return summary

    def limits(self) -> str:
        code = (
            "import json, torch; from benchmarks.common import copy_bandwidth, gemm_rate; "
            "rates = {str(t)[6:]: gemm_rate(t, 'cuda') for t in (torch.bfloat16, torch.float32)}; "
            "print(json.dumps({'copy': copy_bandwidth('cuda'), **rates}))"
        )
        env = self.env | {"PYTHONPATH": _path(ROOT)}
        found = json.loads(self.runner.command([sys.executable, "-c", code], env).splitlines()[-1])
        self.data["limits"] = {
            "copy_bytes_per_second": found["copy"],
            "gemm_bfloat16_flops": found["bfloat16"],
            "gemm_float32_flops": found["float32"],
        }
        return (
            f"copy {found['copy'] / 1e12:.2f} TB/s, matrix product {found['bfloat16'] / 1e12:.0f} TFLOP/s in bf16, "
            f"{found['float32'] / 1e12:.1f} in fp32"
        )

    def benchmark(self, file: Path) -> str:
        out = self.runner.logs / f"{file.stem}.json"
        out.unlink(missing_ok=True)
        try:
            text = self.runner.command(
                [sys.executable, file, "--device", "cuda", "--json", out],
                self.env | {"PYTHONPATH": f"{ROOT}:{self.env['PYTHONPATH']}"},
                ok=(0, 2),
            )
            if "invalid choice: 'cuda'" in text:
                raise Skipped("it runs on the CPU only")
            print(text)
        finally:  # record the benchmark's finished tables even if a later table failed
            if out.exists():
                found = json.loads(out.read_text())
                others = [b for b in self.data["benchmarks"] if b["benchmark"] != found["benchmark"]]
                self.data["benchmarks"] = [*others, found]
        if not out.exists():
            raise Failed(f"it wrote no figures: {text.strip().splitlines()[-1]}")
        return f"{len(found['tables'])} tables"

    def predictions(self, results: Path) -> str:
        """Return the table of gpu_model.py for the measured benchmarks, or a line with the reason why there is none."""
        command = [
            sys.executable,
            ROOT / "benchmarks/gpu_model.py",
            *("--gpu", self.gpu["gpu"]),
            *("--library", self.package / "lib/libshoestring_cuda.so"),
            *("--results", results),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=25, check=False)
        except subprocess.TimeoutExpired:
            return "no predictions: gpu_model took more than 25 s"
        reason = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        return done.stdout.rstrip() if done.returncode == 0 else f"no predictions: {reason}"

    def sanitizer(self, name: str) -> str:
        if shutil.which("compute-sanitizer") is None:
            raise Skipped("compute-sanitizer was not found")
        results = self.runner.logs / f"{name}.pt"
        results.unlink(missing_ok=True)
        # --report-api-errors no and --kernel-regex restrict compute-sanitizer to shoestring's kernels: CUDA's
        # own libraries probe the driver with API calls that fail. Without PyTorch's caching allocator, each
        # tensor is a separate allocation, so an out-of-bounds access is found.
        env = self.env | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        output = self.runner.command(
            [
                "compute-sanitizer",
                "--tool",
                name,
                "--error-exitcode",
                "86",
                "--report-api-errors",
                "no",
                "--kernel-regex",
                "kns=shoestring",
                sys.executable,
                ROOT / "tests/python/emulator_cases.py",
                "run",
                "cuda",
                results,
            ],
            env,
            ok=tuple(range(256)),
        )
        if "Device not supported" in output:
            raise Skipped("compute-sanitizer does not support this machine's GPU")
        summaries = [line.lstrip("= ") for line in output.splitlines() if "SUMMARY:" in line]
        self.data["sanitizer"][name] = summaries
        wrong = [line for line in output.splitlines() if line.startswith("not ok ")]
        hazards = [line for line in output.splitlines() if " Race reported between " in line]
        known = [line for line in hazards if any(f"::{kernel}<" in line for kernel in UNORDERED)]
        clean = bool(summaries) and ("SUMMARY: 0 " in summaries[-1] or 0 < len(hazards) == len(known))
        if wrong or not clean or not results.exists():
            unknown = [line for line in hazards if line not in known]
            raise Failed(
                (wrong or unknown or summaries or output.strip().splitlines() or ["it printed nothing"])[-1]
            )
        return summaries[-1] + (f", all in {' and '.join(UNORDERED)}" if hazards else "")


def figures(benchmarks: list[dict]) -> str:
    """Return a line of text for each table of the benchmarks.

    A line contains the time and the rate of shoestring, and the relative times of the other implementations.
    """
    lines = []
    for table in (table for benchmark in benchmarks for table in benchmark["tables"]):
        ours, *others = table["rows"]
        beside = ", ".join(f"{row['name']} {row['ratio']:.2f}" for row in others)
        rate = f"{ours['seconds'] * 1e3:.3f} ms, {ours['rate']:.1f} {table['unit']}"
        lines.append(f"{table['title']}: {rate}; {beside}\n")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--budget-minutes", type=float, default=9.5, help="the rest is skipped")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="STEP",
        help="only the steps whose names begin so; the file keeps what it has of the others",
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build-gpu", help="the build folder")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="where <gpu>.json goes")
    options = parser.parse_args()
    widen_path()
    # Exit through SystemExit, so that the subprocess of the current step is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    cores = len(os.sched_getaffinity(0))
    runner = Runner(options.build.resolve() / "gpu-check", options.budget_minutes * 60, max(1, cores - 2))
    try:
        environment = json.loads(
            runner.command([sys.executable, ROOT / "scripts/gpu_environment.py"]).splitlines()[-1]
        )
    except Failed as reason:
        parser.exit(2, f"gpu-check: the GPU could not be read: {reason}\n")
    if environment["torch"] is None:
        parser.exit(
            2,
            "gpu-check: PYTHON: expected an interpreter with PyTorch for CUDA, received "
            f"{sys.executable}, which has no PyTorch; set PYTHON\n",
        )
    if environment["gpu"] is None:
        parser.exit(
            2,
            f"gpu-check: no GPU here: PyTorch {environment['torch']} of {sys.executable} sees none; "
            "run it on a machine with one\n",
        )
    check = Check(runner, options.build.resolve(), environment)
    steps = [
        s
        for s in check.steps()
        if not options.only or s.name.startswith(("environment", "build", *options.only))
    ]
    name = "-".join("".join(c if c.isalnum() else " " for c in environment["gpu"].lower()).split())
    target = options.out / f"{name}.json"
    options.out.mkdir(parents=True, exist_ok=True)

    before: dict = {}
    if options.only and target.exists():
        old = json.loads(target.read_text())
        before = {step["name"]: step for step in old["steps"]}
        check.data |= {key: old[key] for key in ("suite", "emulator", "limits", "sanitizer", "benchmarks")}

    def save() -> None:
        now = {r.name: vars(r) | {"seconds": round(r.seconds, 1)} for r in runner.results}
        check.data["steps"] = list({**before, **now}.values())
        target.write_text(json.dumps(check.data, indent=1) + "\n")

    runner.run(steps, save)
    predicted = check.predictions(target) + "\n" if check.data["benchmarks"] else ""
    print("", figures(check.data["benchmarks"]), predicted + runner.table(), target, sep="\n")
    return 1 if runner.failed else 0


if __name__ == "__main__":
    sys.exit(main())
