// Operators for products with matrices of 8 and 4 bits. What they compute is said in quantized.py, and how in few_bits.h.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "few_bits.h"
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"

namespace {

using namespace few_bits;

using Optional = paddle::optional<paddle::Tensor>;

// The matrix of a product, its sizes checked. `depth` input features share `of_word` bytes of each column.
Matrix MatrixOf(const paddle::Tensor& x, const paddle::Tensor& panels, const int8_t* values,
                const paddle::Tensor& scales, const Optional& bias, int64_t columns, int64_t depth,
                int64_t of_word) {
  PD_CHECK(x.is_cpu() && panels.is_cpu() && scales.is_cpu(), "this operator runs on a CPU");
  PD_CHECK(x.dtype() == paddle::DataType::FLOAT32, "activations must be float32");
  Matrix matrix{values, nullptr, bias ? bias->data<float>() : nullptr, x.shape().back(), columns};
  const bool are_halves = scales.dtype() == paddle::DataType::FLOAT16;
  matrix.SetScales(are_halves ? static_cast<const void*>(scales.data<paddle::float16>()) : scales.data<float>(),
                   scales.shape()[1], are_halves);
  const int64_t words = (matrix.size + depth - 1) / depth;
  PD_CHECK(panels.shape()[0] == matrix.Panels() && panels.numel() == matrix.Panels() * words * kWidth * of_word &&
               scales.shape()[0] == matrix.Panels() && scales.shape()[2] == kWidth &&
               (!bias || bias->numel() == columns),
           "panels do not fit");
  PD_CHECK(matrix.groups == 1 || (matrix.size % matrix.groups == 0 && matrix.size / matrix.groups % kBlock == 0),
           "groups do not fit");
  return matrix;
}

paddle::Tensor Result(const paddle::Tensor& x, int64_t columns) {
  auto shape = x.shape();
  shape.back() = columns;
  return paddle::empty(shape, x.dtype(), x.place());
}

int64_t RowsOf(const paddle::Tensor& x) { return x.numel() ? x.numel() / x.shape().back() : 0; }

std::vector<paddle::Tensor> Int8(const paddle::Tensor& x, const paddle::Tensor& panels, const paddle::Tensor& scales,
                                 const Optional& bias, int64_t columns) {
  const Matrix matrix = MatrixOf(x, panels, panels.data<int8_t>(), scales, bias, columns, kBlock, kBlock);
  auto out = Result(x, columns);
  ProductOf<EightBits>(x.data<float>(), RowsOf(x), matrix, out.data<float>());
  return {out};
}

std::vector<paddle::Tensor> Int4(const paddle::Tensor& x, const paddle::Tensor& panels, const paddle::Tensor& scales,
                                 const Optional& bias, int64_t columns) {
  const auto* values = reinterpret_cast<const int8_t*>(panels.data<uint8_t>());
  const Matrix matrix = MatrixOf(x, panels, values, scales, bias, columns, kBlock, 4);
  auto out = Result(x, columns);
  ProductOf<FourBits>(x.data<float>(), RowsOf(x), matrix, out.data<float>());
  return {out};
}

std::vector<paddle::Tensor> Int8Int8(const paddle::Tensor& x, const paddle::Tensor& panels,
                                     const paddle::Tensor& scales, const Optional& bias, int64_t columns) {
  const Matrix matrix = MatrixOf(x, panels, panels.data<int8_t>(), scales, bias, columns, kQuad, kQuad);
  PD_CHECK(matrix.size <= kMostInputs, "too many input features");
  auto out = Result(x, columns);
  RoundedProductOf<EightBitQuads>(x.data<float>(), RowsOf(x), matrix, out.data<float>());
  return {out};
}

std::vector<paddle::Tensor> Int4Int8(const paddle::Tensor& x, const paddle::Tensor& panels,
                                     const paddle::Tensor& scales, const Optional& bias, int64_t columns) {
  const auto* values = reinterpret_cast<const int8_t*>(panels.data<uint8_t>());
  const Matrix matrix = MatrixOf(x, panels, values, scales, bias, columns, kBlock, 4);
  PD_CHECK(matrix.size <= kMostInputs, "too many input features");
  auto out = Result(x, columns);
  RoundedProductOf<FourBitBlocks>(x.data<float>(), RowsOf(x), matrix, out.data<float>());
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

PD_BUILD_OP(ppfleetx_int8)
    .Inputs({"X", "Panels", "Scales", paddle::Optional("Bias")})
    .Outputs({"Out"})
    .Attrs({"columns: int64_t"})
    .SetKernelFn(PD_KERNEL(Int8))
    .SetInferShapeFn(PD_INFER_SHAPE(ShapeOf))
    .SetInferDtypeFn(PD_INFER_DTYPE(TypeOf));

PD_BUILD_OP(ppfleetx_int4)
    .Inputs({"X", "Panels", "Scales", paddle::Optional("Bias")})
    .Outputs({"Out"})
    .Attrs({"columns: int64_t"})
    .SetKernelFn(PD_KERNEL(Int4))
    .SetInferShapeFn(PD_INFER_SHAPE(ShapeOf))
    .SetInferDtypeFn(PD_INFER_DTYPE(TypeOf));

PD_BUILD_OP(ppfleetx_int8_int8)
    .Inputs({"X", "Panels", "Scales", paddle::Optional("Bias")})
    .Outputs({"Out"})
    .Attrs({"columns: int64_t"})
    .SetKernelFn(PD_KERNEL(Int8Int8))
    .SetInferShapeFn(PD_INFER_SHAPE(ShapeOf))
    .SetInferDtypeFn(PD_INFER_DTYPE(TypeOf));

PD_BUILD_OP(ppfleetx_int4_int8)
    .Inputs({"X", "Panels", "Scales", paddle::Optional("Bias")})
    .Outputs({"Out"})
    .Attrs({"columns: int64_t"})
    .SetKernelFn(PD_KERNEL(Int4Int8))
    .SetInferShapeFn(PD_INFER_SHAPE(ShapeOf))
    .SetInferDtypeFn(PD_INFER_DTYPE(TypeOf));
