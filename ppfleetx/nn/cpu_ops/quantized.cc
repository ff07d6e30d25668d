// Operators for products with matrices of 8 and 4 bits. They are documented in quantized.py, and implemented in
// few_bits.h.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "few_bits.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"

namespace {

using namespace few_bits;

using Optional = paddle::optional<paddle::Tensor>;

// Multiplies x by a matrix that is stored in the panels of a format.
template <class Format>
std::vector<paddle::Tensor> Multiply(const paddle::Tensor& x, const paddle::Tensor& panels,
                                     const paddle::Tensor& scales, const Optional& bias, int64_t columns) {
  PD_CHECK(x.is_cpu() && panels.is_cpu() && scales.is_cpu(), "this operator runs on a CPU");
  PD_CHECK(x.dtype() == paddle::DataType::FLOAT32, "activations must be float32");
  const auto* values = reinterpret_cast<const int8_t*>(panels.data<typename Format::Stored>());
  auto shape = x.shape();
  Matrix matrix{values, nullptr, bias ? bias->data<float>() : nullptr, shape.back(), columns};
  const bool are_halves = scales.dtype() == paddle::DataType::FLOAT16;
  matrix.SetScales(are_halves ? static_cast<const void*>(scales.data<paddle::float16>()) : scales.data<float>(),
                   scales.shape()[1], are_halves);
  const int64_t units = (matrix.size + Format::kUnit - 1) / Format::kUnit;
  PD_CHECK(panels.shape()[0] == matrix.Panels() && panels.numel() == matrix.Panels() * units * Format::kUnitBytes &&
               scales.shape()[0] == matrix.Panels() && scales.shape()[2] == kWidth &&
               (!bias || bias->numel() == columns),
           "panels do not fit");
  PD_CHECK(matrix.groups == 1 || (matrix.size % matrix.groups == 0 && matrix.size / matrix.groups % kBlock == 0),
           "groups do not fit");
  PD_CHECK(!Format::kRounds || matrix.size <= kMostInputs, "too many input features");
  const int64_t rows = x.numel() ? x.numel() / matrix.size : 0;
  shape.back() = columns;
  auto out = paddle::empty(shape, x.dtype(), x.place());
  ProductOf<Format>(x.data<float>(), rows, matrix, out.data<float>());
  return {out};
}

std::vector<std::vector<int64_t>> ShapeOf(std::vector<int64_t> x, const std::vector<int64_t>&,
                                         const std::vector<int64_t>&, const paddle::optional<std::vector<int64_t>>&,
                                         int64_t columns) {
  x.back() = columns;
  return {x};
}

std::vector<paddle::DataType> TypeOf(paddle::DataType x, paddle::DataType, paddle::DataType,
                                    const paddle::optional<paddle::DataType>&) {
  return {x};
}

}  // namespace

#define OPERATOR(name, Format)                                   \
  PD_BUILD_OP(name)                                              \
      .Inputs({"X", "Panels", "Scales", paddle::Optional("Bias")}) \
      .Outputs({"Out"})                                          \
      .Attrs({"columns: int64_t"})                               \
      .SetKernelFn(PD_KERNEL(Multiply<Format>))                  \
      .SetInferShapeFn(PD_INFER_SHAPE(ShapeOf))                  \
      .SetInferDtypeFn(PD_INFER_DTYPE(TypeOf))

OPERATOR(ppfleetx_int8, EightBits);
OPERATOR(ppfleetx_int4, FourBits);
OPERATOR(ppfleetx_int8_int8, EightBitQuads);
OPERATOR(ppfleetx_int4_int8, FourBitBlocks);
