"""Names, sources and files of the operator libraries. Does not import Paddle."""

from __future__ import annotations

import hashlib
import platform
from importlib.util import find_spec
from pathlib import Path

from ppfleetx.utils.device_support import cpu_obstacle
from ppfleetx.utils.machine import AVX512, flags_in, read_cpuinfo

BUILT = Path(__file__).with_name("built")
HOW_TO_MAKE = "python -m ppfleetx.nn.cpu_ops"
NOT_COMPILED = f"operators are not compiled ({HOW_TO_MAKE} does that)"
"""The text in messages if operators are missing."""
WIDTH = 48 if flags_in(read_cpuinfo()) >= AVX512 else 16
"""Number of columns of a panel. A tile of MKL's kernels has this width: three float32 registers with AVX-512,
two with AVX2."""
OPTIONS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-w", f"-DPANEL_WIDTH={WIDTH}"),
    *("-DPADDLE_WITH_CUSTOM_KERNEL", "-D_GLIBCXX_USE_CXX11_ABI=1"),  # required by Paddle's headers
)
"""Options of the C++ compiler."""
LIBRARIES = {
    "ops": "operators for decoding",
    "quantized": "operators for quantized models",
    "fused_blocks": "operator for whole blocks",
    "bfloat16": "operators for training in bfloat16",
}
SOURCES = {name: Path(__file__).with_name(f"{name}.cc") for name in LIBRARIES}
"""The source file of each library. The Python module with the library's name calls its operators."""


def library_path(library: str) -> Path:
    """Return the path of an operator library, even if the library has not been compiled yet."""
    # The file name contains a hash of Paddle's version, the options, the CPU and the source code. If one of
    # them changes, a new library is needed.
    source = SOURCES[library]
    cpuinfo = read_cpuinfo()
    # On processors other than x86, Linux lists no flags; use the whole description.
    cpu = sorted(flags_in(cpuinfo)) or [platform.machine(), cpuinfo]
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    digest = hashlib.sha256(b"".join((*texts, _paddle_version())) + " ".join((*OPTIONS, *cpu)).encode())
    return BUILT / f"{library}-{digest.hexdigest()[:16]}.so"


def _paddle_version() -> bytes:
    """Return the contents of Paddle's version file, which includes the version and the commit."""
    paddle = find_spec("paddle")
    if paddle is None or paddle.origin is None:
        return b""
    return (Path(paddle.origin).parent / "version" / "__init__.py").read_bytes()


def obstacle(dtype: str) -> str | None:
    """Return why this CPU cannot compute in ``dtype`` (``float16`` or ``bfloat16``), for example because the
    operators are not compiled; None if it can."""
    return cpu_obstacle(dtype) or (None if library_path("bfloat16").exists() else NOT_COMPILED)
