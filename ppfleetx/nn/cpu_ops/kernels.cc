// Operators for decoding on a CPU. What they compute is said in ops.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "few_rows.h"

#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"

namespace {

// ---- few_rows: y = x W + b; few_rows.h says how -----------------------------------------------------------------

using few_rows::kWidth;

std::vector<paddle::Tensor> FewRows(const paddle::Tensor& x, const paddle::Tensor& panels,
                                    const paddle::optional<paddle::Tensor>& bias, int64_t columns) {
  auto shape = x.shape();
  const int64_t size = shape.back(), rows = x.numel() / size;
  PD_CHECK(x.is_cpu() && panels.is_cpu(), "this operator runs on a CPU");
  PD_CHECK(panels.shape()[2] == kWidth && panels.shape()[1] == size &&
               panels.shape()[0] == (columns + kWidth - 1) / kWidth && (!bias || bias->numel() == columns),
           "panels do not fit");
  shape.back() = columns;
  auto out = paddle::empty(shape, x.dtype(), x.place());
  few_rows::Product(x.data<float>(), rows, size, panels.data<float>(), bias ? bias->data<float>() : nullptr, columns,
                    out.data<float>());
  return {out};
}

std::vector<std::vector<int64_t>> FewRowsShape(std::vector<int64_t> x, const std::vector<int64_t>&,
                                              const paddle::optional<std::vector<int64_t>>&, int64_t columns) {
  x.back() = columns;
  return {x};
}

std::vector<paddle::DataType> FewRowsType(paddle::DataType x, paddle::DataType,
                                         const paddle::optional<paddle::DataType>&) {
  return {x};
}

// ---- grouped_product: rows sorted into groups, each with its own W ---------------------------------------------

std::vector<paddle::Tensor> Grouped(const paddle::Tensor& x, const paddle::Tensor& weight, const paddle::Tensor& counts) {
  const int64_t rows = x.shape()[0], size = x.shape()[1], groups = weight.shape()[0], columns = weight.shape()[2];
  PD_CHECK(x.is_cpu() && weight.is_cpu() && counts.is_cpu(), "this operator runs on a CPU");
  PD_CHECK(weight.shape()[1] == size && counts.numel() == groups, "weights do not fit");
  const int64_t* of_each = counts.data<int64_t>();
  PD_CHECK(std::accumulate(of_each, of_each + groups, int64_t{0}) == rows, "the counts are not those of the rows");
  auto out = paddle::empty({rows, columns}, x.dtype(), x.place());
  few_rows::GroupedProduct(x.data<float>(), of_each, groups, size, weight.data<float>(), columns, out.data<float>());
  return {out};
}

std::vector<std::vector<int64_t>> GroupedShape(std::vector<int64_t> x, std::vector<int64_t> weight,
                                              const std::vector<int64_t>&) {
  return {{x[0], weight[2]}};
}

std::vector<paddle::DataType> GroupedType(paddle::DataType x, paddle::DataType, paddle::DataType) { return {x}; }

// ---- nucleus: top-p without sorting a vocabulary --------------------------------------------------------------
//
// The mass of the probabilities is summed in buckets, from the likeliest down until p is reached; only that
// bucket is put in order. A bucket is exponent and 7 bits of the fraction of a number that is not negative.

constexpr int kShift = 16;
constexpr uint32_t kBuckets = (0x3f800000u >> kShift) + 1;  // up to 1.0

uint32_t BitsOf(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

float FloatOf(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

uint32_t BucketOf(float probability) {
  return std::min(BitsOf(probability) >> kShift, kBuckets - 1);  // the last also takes what is no number
}

void KeepNucleus(const float* probabilities, int64_t size, double top_p, float* kept) {
  std::vector<double> mass(kBuckets);
  for (int64_t i = 0; i < size; ++i) mass[BucketOf(probabilities[i])] += probabilities[i];
  double above = 0;
  uint32_t boundary = kBuckets - 1;
  while (boundary > 0 && above + mass[boundary] < top_p) above += mass[boundary--];
  std::vector<uint32_t> falling;  // of the bits, whose order is that of the numbers
  for (int64_t i = 0; i < size; ++i)
    if (BucketOf(probabilities[i]) == boundary) falling.push_back(BitsOf(probabilities[i]));
  std::sort(falling.begin(), falling.end(), std::greater<uint32_t>());
  // Where all that there is does not sum to p, which only rounding brings about, all of it stays.
  size_t count = 0;
  while (count < falling.size() && above < top_p) above += FloatOf(falling[count++]);
  const uint32_t smallest = count ? falling[count - 1] : 0;
  for (int64_t i = 0; i < size; ++i) kept[i] = BitsOf(probabilities[i]) >= smallest ? probabilities[i] : 0.0f;
  auto too_many = std::count(falling.begin() + count, falling.end(), smallest);
  for (int64_t i = size; too_many > 0; )  // of equal ones the lower ids stay
    if (BitsOf(probabilities[--i]) == smallest) {
      kept[i] = 0.0f;
      --too_many;
    }
}

std::vector<paddle::Tensor> Nucleus(const paddle::Tensor& probabilities, const paddle::Tensor& top_p) {
  const int64_t size = probabilities.shape().back(), rows = probabilities.numel() / size;
  PD_CHECK(probabilities.is_cpu() && top_p.is_cpu(), "this operator runs on a CPU");
  auto out = paddle::empty(probabilities.shape(), probabilities.dtype(), probabilities.place());
  const float *from = probabilities.data<float>(), p = top_p.data<float>()[0];
  float* to = out.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) KeepNucleus(from + row * size, size, p, to + row * size);
  return {out};
}

std::vector<std::vector<int64_t>> NucleusShape(std::vector<int64_t> probabilities, const std::vector<int64_t>&) {
  return {probabilities};
}

std::vector<paddle::DataType> NucleusType(paddle::DataType probabilities, paddle::DataType) {
  return {probabilities};
}

}  // namespace

PD_BUILD_OP(ppfleetx_few_rows)
    .Inputs({"X", "Panels", paddle::Optional("Bias")})
    .Outputs({"Out"})
    .Attrs({"columns: int64_t"})
    .SetKernelFn(PD_KERNEL(FewRows))
    .SetInferShapeFn(PD_INFER_SHAPE(FewRowsShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(FewRowsType));

PD_BUILD_OP(ppfleetx_grouped_product)
    .Inputs({"X", "Weight", "Counts"})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(Grouped))
    .SetInferShapeFn(PD_INFER_SHAPE(GroupedShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(GroupedType));

PD_BUILD_OP(ppfleetx_nucleus)
    .Inputs({"Probabilities", "TopP"})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(Nucleus))
    .SetInferShapeFn(PD_INFER_SHAPE(NucleusShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(NucleusType));
