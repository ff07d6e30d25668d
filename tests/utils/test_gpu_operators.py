from ppfleetx.utils.gpu_operators import Kernel, missing_kernels, registered_types, used_kernels


def test_what_is_used_is_registered():
    kernels = used_kernels()
    assert len(kernels) > 90
    assert {name: kernel.missing for name, kernel in kernels.items() if kernel.missing} == {}


def test_a_build_that_lacks_a_type_is_told():
    keys = ["(GPU, Undefined(AnyLayout), float32)", "(CPU, Undefined(AnyLayout), bfloat16)"]
    used = {"gelu": Kernel(("bfloat16", "float32"), ("float32",)), "silu": Kernel(("float32",), ())}
    assert registered_types(keys) == {"float32"}
    assert missing_kernels({"gelu": keys}, used) == [("gelu", "bfloat16"), ("silu", "float32")]
    assert used["gelu"].missing == ("bfloat16",)
