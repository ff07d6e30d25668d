from pathlib import Path

from ppfleetx.utils.gpu_operators import PLUGIN_BACKENDS, registered_types, used_kernels, used_on_plugins

ASCEND = Path("docs/devices/ascend.md")
ON_THE_HOST = {
    "add_n": ["bfloat16"],
    "assign_value": ["float64"],
    "bincount": ["int64"],
    "cumsum": ["float64"],
    "embedding": ["int8"],
    "full": ["int8", "uint8"],
    "full_like": ["float64"],
    "full_with_tensor": ["float32", "int64"],
    "index_add": ["float32"],
    "index_select": ["bfloat16"],
    "max": ["float64"],
    "put_along_axis": ["float32"],
    "scatter": ["float64"],
    "searchsorted": ["float32"],
    "subtract": ["bfloat16"],
    "subtract_grad": ["bfloat16"],
}
"""What Ascend's plugin has no kernel for."""


def test_what_is_used_is_registered():
    kernels = used_kernels()
    assert len(kernels) > 90
    missing = {name: set(kernel.used) - set(kernel.gpu) for name, kernel in kernels.items()}
    assert {name: types for name, types in missing.items() if types} == {}


def test_what_ascend_lacks_is_known_and_on_the_page():
    kernels, asked = used_kernels(), used_on_plugins(used_kernels())
    lacking = {name: [t for t in types if t not in kernels[name].npu] for name, types in asked.items()}
    assert {name: types for name, types in lacking.items() if types} == ON_THE_HOST
    page = ASCEND.read_text("utf-8")
    assert [name for name in ON_THE_HOST if f"`{name}`" not in page] == []


def test_the_host_can_compute_it():
    """What neither the plugin nor a CPU has would end the run."""
    from paddle.base import core

    registry = core._get_registered_phi_kernels("function")
    for name, types in ON_THE_HOST.items():
        assert set(types) <= registered_types(registry[name], ("CPU",)), name
    of_paddle = {name: registered_types(registry.get(name, ()), PLUGIN_BACKENDS) for name in used_kernels()}
    unknown = {name: types - set(used_kernels()[name].npu) for name, types in of_paddle.items()}
    assert not any(unknown.values()), "this Paddle has kernels for plugins that the table does not know"
