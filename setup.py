# SPDX-License-Identifier: BSD-3-Clause
"""Builds fused_ops/_C: the torch ops and the pybind11 module, in one file.

Where an nvcc is found the CUDA kernels are compiled in, whether or not the installed torch is a
CUDA build and whether or not the machine has a GPU; where none is found they are left out.

Environment:
  FUSED_OPS_BUILD       auto (default), cpu (no CUDA kernels), cuda (fail without nvcc),
                        none (no native module at all)
  TORCH_CUDA_ARCH_LIST  GPU architectures, by default every one in ARCHITECTURES
  MAX_JOBS              parallel compilations, by default from cores and free memory
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
# "a": with the tensor cores' own code. 8.9 runs the code of 8.6, beyond which nothing is used here.
ARCHITECTURES = "7.5 8.0 8.6 9.0a 10.0 12.0+PTX"
GIGABYTES_PER_JOB = 2  # the peak of one nvcc compilation of our sources, rounded up
TARGET = "0x020a000000000000"  # the stable ABI of torch 2.10, our oldest

if sys.platform != "linux" and os.environ.get("FUSED_OPS_BUILD") != "none":
    sys.exit("fused_ops builds on Linux only; FUSED_OPS_BUILD=none installs the PyTorch fallback.")


def find_nvcc() -> str | None:
    """The nvcc of CUDA_HOME, of PATH, of PyPI's cuda-toolkit, or of /usr/local/cuda."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return shutil.which("nvcc", path=os.path.join(home, "bin"))
    elsewhere = [os.path.join(path, "nvidia", "cu13", "bin") for path in sys.path]
    elsewhere.append("/usr/local/cuda/bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(elsewhere))


def describe_nvcc(nvcc: str) -> tuple[str, str, set[str]]:
    """(toolkit root, version, supported sm numbers). The root is asked of nvcc itself, because
    the nvcc on PATH may be a link or a wrapper script."""

    def run(*arguments):
        done = subprocess.run([nvcc, *arguments], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    here = re.search(r"_HERE_=(.*)", run("--dryrun", "-x", "cu", "-c", os.devnull))[1]
    version = re.search(r"release (\d+\.\d+)", run("--version"))[1]
    return str(Path(here).parent), version, set(re.findall(r"sm_(\d+)", run("--list-gpu-code")))


def default_jobs() -> int:
    available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    gigabytes = int(available[1]) / 2**20 if available else GIGABYTES_PER_JOB
    return max(1, min(len(os.sched_getaffinity(0)), int(gigabytes / GIGABYTES_PER_JOB)))


def longest_first(source: str) -> tuple:
    """Sorts sources by how long they take: those with CUDA kernels first, the loss's before all."""
    return not source.endswith("_launch.cu"), "triplet" not in source, source


def native_module(build: str) -> dict:
    """The arguments of setup() that build fused_ops/_C."""
    import pybind11
    import torch
    from torch.utils import cpp_extension

    class BuildExtension(cpp_extension.BuildExtension):
        """Keeps the whole source name in the object's, so that x.cpp and x.cu may coexist, and
        starts with what takes longest, so that at the end no processor waits for it."""

        def build_extensions(self):
            self.compiler.object_filenames = lambda sources, strip_dir=False, output_dir="": [
                os.path.join(output_dir, f"{source}.o") for source in sources
            ]
            super().build_extensions()

        def build_extension(self, ext):
            compile = self.compiler.compile
            self.compiler.compile = lambda sources, *rest, **options: compile(
                sorted(sources, key=longest_first), *rest, **options
            )
            super().build_extension(ext)

    nvcc = find_nvcc() if build != "cpu" else None
    if build == "cuda" and nvcc is None:
        sys.exit(
            "FUSED_OPS_BUILD=cuda needs nvcc; set CUDA_HOME or pip install 'fused_ops[cuda13]'"
        )

    suffixes = (".cpp", ".cu") if nvcc else (".cpp",)
    sources = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in suffixes and (nvcc or not path.stem.endswith("_cuda"))
    )
    # Neither the sources' nor torch's place on this machine belongs in the file.
    prefixes = [
        f"-ffile-prefix-map={ROOT}/=",
        f"-ffile-prefix-map={Path(torch.__file__).parents[1]}/=",
    ]
    common = ["-fvisibility=hidden", *prefixes]
    # Without contraction every instruction set, and every variant of a kernel, gives the same bits.
    # Where a fused multiply-add is wanted the code says so.
    # Without errno a root may be one of vectors.
    exact = ["-ffp-contract=off", "-fno-math-errno"]
    flags = {"cxx": ["-O3", "-g0", "-std=c++20", *exact, *common]}
    # Linked by hand: libtorch must stay NEEDED although nothing of it is referenced, since in a
    # CUDA build it is what brings libtorch_cuda, and with it the current stream, into scope.
    # libstdc++ by its file name, since some machines link it statically by default: then the
    # module's copy and torch's share half their state, and writing an error message crashes. And
    # before torch, which exports some of its symbols; what a compiler has beyond the system's
    # libstdc++ comes with it.
    beyond = subprocess.run(
        [cpp_extension.get_cxx_compiler(), "-print-file-name=libstdc++_nonshared.a"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    link = ["-l:libstdc++.so.6", *([beyond] if os.path.isabs(beyond) else [])]
    link += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"]
    macros = [("TORCH_TARGET_VERSION", TARGET)]
    make_extension = cpp_extension.CppExtension
    if nvcc:
        root, version, supported = describe_nvcc(nvcc)
        known = [a for a in ARCHITECTURES.split() if re.sub(r"\D", "", a) in supported]
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", " ".join(known))
        macros += [
            ("FUSED_OPS_CUDA_VERSION", f'"{version}"'),
            ("FUSED_OPS_ARCHITECTURES", f'"{os.environ["TORCH_CUDA_ARCH_LIST"]}"'),
        ]
        make_extension = cpp_extension.CUDAExtension
        cpp_extension.CUDA_HOME = root  # unset where torch is a CPU build
        torch.version.cuda = torch.version.cuda or version  # else no header dependencies for .cu
        # nvcc and torch may differ in CUDA version, for none of torch's CUDA is linked.
        cpp_extension._check_cuda_version = lambda *_: None
        flags["nvcc"] = ["-O3", "-std=c++20", "--fmad=false"]
        flags["nvcc"] += ["--threads=2", "--expt-relaxed-constexpr"]
        flags["nvcc"] += ["-Xcompiler=" + ",".join(common)]
        if int(version.split(".")[0]) >= 13:
            flags["nvcc"] += ["--compress-mode=size"]
        link += [f"-L{root}/lib64", f"-L{root}/lib", "-lcudart_static", "-lrt", "-lpthread"]
    else:
        print("fused_ops: no nvcc, so the CUDA kernels are left out; CPU kernels only.", flush=True)

    os.environ.setdefault("MAX_JOBS", str(default_jobs()))
    # torch looks for ninja on PATH, where an environment that is not activated is missing.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    extension = make_extension(
        "fused_ops._C",
        sources,
        include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
        define_macros=macros,
        extra_compile_args=flags,
        extra_link_args=[*link, "-ldl"],
    )
    extension.libraries = []  # all of them stand in extra_link_args
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension}}


mode = os.environ.get("FUSED_OPS_BUILD", "auto")
if mode not in ("auto", "cpu", "cuda", "none"):
    sys.exit(f"FUSED_OPS_BUILD must be auto, cpu, cuda or none, got {mode!r}")
setup(**({} if mode == "none" else native_module(mode)))
