"""Products and functions of the operators for CPUs under GCC's sanitizers, in each form this CPU can run.

    python -m tests.nn.sanitized_products --cases 600

Compiles ``sanitized_products.cc``, which needs no Paddle, once for each form and compares random cases with
float64. The suite does not run it: it takes minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from ppfleetx.nn.cpu_ops.build import find_compiler
from ppfleetx.nn.cpu_ops.compiled import SOURCES
from ppfleetx.utils.machine import AVX512, flags_in, read_cpuinfo

# What GCC calls the CPU, columns of a panel, and the flags that the form needs beside those of any x86-64.
FORMS: dict[str, tuple[str, int, frozenset[str]]] = {
    "AVX-512 with VNNI": ("icelake-server", 48, AVX512 | {"avx512_vnni"}),
    "AVX-512": ("skylake-avx512", 48, AVX512),
    "AVX2 with VNNI": ("alderlake", 16, frozenset({"avx2", "fma", "avx_vnni"})),
    "AVX2": ("haswell", 16, frozenset({"avx2", "fma"})),
    "plain": ("x86-64", 16, frozenset()),
}
_OPTIONS = ("-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-w")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    args = parser.parse_args()
    here = flags_in(read_cpuinfo())
    for form in args.forms:
        march, width, needed = FORMS[form]
        if needed <= here:
            print(f"{form}: {run(march, width, args.cases)}", flush=True)
        else:
            print(f"{form}: not run, this CPU has no {', '.join(sorted(needed - here))}", flush=True)


def run(march: str, width: int, cases: int) -> str:
    """Compile and run the program; return its last line. Raises CalledProcessError if it cannot be compiled,
    a result is wrong, or a sanitizer reports an error."""
    with tempfile.TemporaryDirectory() as directory:
        program = str(Path(directory) / "products")
        source = str(Path(__file__).with_suffix(".cc"))
        options = [*_OPTIONS, f"-march={march}", f"-DPANEL_WIDTH={width}", f"-I{SOURCES['kernels'].parent}"]
        subprocess.run([*find_compiler(), *options, source, "-o", program], check=True)
        done = subprocess.run([program, str(cases)], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
