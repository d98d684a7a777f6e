"""Which warnings are errors in tests: all, but for remarks on speed and what other packages announce about themselves."""

import warnings

import pytest

MESSAGES = (
    "mkldnn_matmul failed, switching to BLAS gemm: mkldnn_matmul: mkldnn_matmul bf16 path needs the cpu support avx_ne_convert",
    "mkldnn_matmul failed, switching to baddbmm: mkldnn_matmul: mkldnn_matmul bf16 path needs the cpu support avx_ne_convert",
)
"""What torch says once where a CPU has no instructions for BF16, in the words of ATen/native/LinearAlgebra.cpp."""


def warn_in(package: str, category: type[Warning], stacklevel: int = 1, folder: str = "/lib/site-packages") -> None:
    """Warn from a function of a module of that package."""
    code = compile("def f(category, level): warnings.warn('soon', category, stacklevel=level)", f"{folder}/module.py", "exec")
    module = {"__name__": f"{package}.module", "warnings": warnings}
    exec(code, module)
    module["f"](category, stacklevel)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_cpu_without_bf16_is_no_error(message):
    warnings.warn(message, UserWarning, stacklevel=1)


@pytest.mark.parametrize("stacklevel", [1, 2])
@pytest.mark.parametrize("category", [FutureWarning, DeprecationWarning])
def test_deprecations_of_other_packages_are_no_errors(category, stacklevel):
    warn_in("transformers", category, stacklevel)


@pytest.mark.parametrize("stacklevel", [1, 2])
@pytest.mark.parametrize("category", [FutureWarning, DeprecationWarning])
def test_deprecations_of_torch_and_of_our_own_are_errors(category, stacklevel):
    for package, folder in (("torch", "/lib/site-packages"), ("dither", "/src"), ("test_mine", "/tests")):
        with pytest.raises(category, match="soon"):
            warn_in(package, category, stacklevel, folder)


def test_other_warnings_of_other_packages_are_errors():
    for category in (UserWarning, RuntimeWarning):
        with pytest.raises(category, match="soon"):
            warn_in("transformers", category)
