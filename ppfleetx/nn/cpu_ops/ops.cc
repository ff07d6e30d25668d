// Operators for decoding and training on a CPU. They are documented in ops.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "few_rows.h"
#include "vector_math.h"

#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"

namespace {

using paddle::DataType;
using paddle::Tensor;
using Shape = std::vector<int64_t>;

// ---- few_rows: y = x W + b, implemented in few_rows.h -----------------------------------------------------------

using few_rows::kWidth;

std::vector<Tensor> FewRows(const Tensor& x, const Tensor& panels,
                            const paddle::optional<Tensor>& bias, int64_t columns) {
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

std::vector<Shape> FewRowsShape(Shape x, const Shape&, const paddle::optional<Shape>&, int64_t columns) {
  x.back() = columns;
  return {x};
}

std::vector<DataType> FewRowsType(DataType x, DataType, const paddle::optional<DataType>&) { return {x}; }

// ---- grouped_product: rows sorted into groups, each with its own W ---------------------------------------------

std::vector<Tensor> Grouped(const Tensor& x, const Tensor& weight, const Tensor& counts) {
  const int64_t rows = x.shape()[0], size = x.shape()[1], groups = weight.shape()[0], columns = weight.shape()[2];
  PD_CHECK(x.is_cpu() && weight.is_cpu() && counts.is_cpu(), "this operator runs on a CPU");
  PD_CHECK(weight.shape()[1] == size && counts.numel() == groups, "weights do not fit");
  const int64_t* of_each = counts.data<int64_t>();
  PD_CHECK(std::accumulate(of_each, of_each + groups, int64_t{0}) == rows, "the counts are not those of the rows");
  auto out = paddle::empty({rows, columns}, x.dtype(), x.place());
  few_rows::GroupedProduct(x.data<float>(), of_each, groups, size, weight.data<float>(), columns, out.data<float>());
  return {out};
}

std::vector<Shape> GroupedShape(Shape x, Shape weight, const Shape&) { return {{x[0], weight[2]}}; }

std::vector<DataType> GroupedType(DataType x, DataType, DataType) { return {x}; }

// ---- nucleus: top-p without sorting a vocabulary --------------------------------------------------------------
//
// The probabilities are summed by buckets, from the largest numbers down, until the sum reaches p. Only the last
// of these buckets is sorted. The bucket of a number (not negative) is its exponent and 7 bits of its fraction.

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
  return std::min(BitsOf(probability) >> kShift, kBuckets - 1);  // the last bucket also takes NaN
}

void KeepNucleus(const float* probabilities, int64_t size, double top_p, float* kept) {
  std::vector<double> mass(kBuckets);
  for (int64_t i = 0; i < size; ++i) mass[BucketOf(probabilities[i])] += probabilities[i];
  double above = 0;
  uint32_t boundary = kBuckets - 1;
  while (boundary > 0 && above + mass[boundary] < top_p) above += mass[boundary--];
  std::vector<uint32_t> falling;  // bit patterns, which sort like the numbers
  for (int64_t i = 0; i < size; ++i)
    if (BucketOf(probabilities[i]) == boundary) falling.push_back(BitsOf(probabilities[i]));
  std::sort(falling.begin(), falling.end(), std::greater<uint32_t>());
  // If all probabilities sum to less than p, which only rounding can cause, all are kept.
  size_t count = 0;
  while (count < falling.size() && above < top_p) above += FloatOf(falling[count++]);
  const uint32_t smallest = count ? falling[count - 1] : 0;
  for (int64_t i = 0; i < size; ++i) kept[i] = BitsOf(probabilities[i]) >= smallest ? probabilities[i] : 0.0f;
  auto too_many = std::count(falling.begin() + count, falling.end(), smallest);
  for (int64_t i = size; too_many > 0; )  // of equal probabilities, the lower ids are kept
    if (BitsOf(probabilities[--i]) == smallest) {
      kept[i] = 0.0f;
      --too_many;
    }
}

std::vector<Tensor> Nucleus(const Tensor& probabilities, const Tensor& top_p) {
  const int64_t size = probabilities.shape().back(), rows = probabilities.numel() / size;
  PD_CHECK(probabilities.is_cpu() && top_p.is_cpu(), "this operator runs on a CPU");
  auto out = paddle::empty(probabilities.shape(), probabilities.dtype(), probabilities.place());
  const float *from = probabilities.data<float>(), p = top_p.data<float>()[0];
  float* to = out.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) KeepNucleus(from + row * size, size, p, to + row * size);
  return {out};
}

std::vector<Shape> NucleusShape(Shape probabilities, const Shape&) { return {probabilities}; }

std::vector<DataType> NucleusType(DataType probabilities, DataType) { return {probabilities}; }

// ---- cross entropy and its gradient ------------------------------------------------------------------------------

using vector_math::kLanes;
using vector_math::Vector;

constexpr int64_t kIgnored = -100;  // a label without a loss, as in Paddle
constexpr int64_t kPiece = 1024;    // exponentials that are summed in float32; the pieces are summed in float64

// Returns the logarithm of the sum of the exponentials.
double LogSumExp(const float* logits, int64_t size) {
  const float largest = vector_math::Largest(logits, size);
  double total = 0;
  for (int64_t begin = 0; begin < size; begin += kPiece) {
    const int64_t end = std::min(begin + kPiece, size);
    Vector sum = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) sum += vector_math::Exp(vector_math::Load(logits + i) - largest);
    if (i < end) total += vector_math::Sum(vector_math::Exp(vector_math::LoadFirst(logits + i, end - i, -INFINITY) - largest));
    total += vector_math::Sum(sum);
  }
  return largest + std::log(total);
}

std::vector<Tensor> CrossEntropy(const Tensor& logits, const Tensor& labels) {
  const int64_t columns = logits.shape().back(), rows = logits.numel() / columns;
  PD_CHECK(logits.is_cpu() && labels.is_cpu() && labels.numel() == rows, "labels do not fit");
  auto losses = paddle::empty(labels.shape(), DataType::FLOAT64, logits.place());
  auto logarithms = paddle::empty(labels.shape(), DataType::FLOAT64, logits.place());
  const float* from = logits.data<float>();
  const int64_t* label = labels.data<int64_t>();
  for (int64_t row = 0; row < rows; ++row)
    PD_CHECK(label[row] == kIgnored || (label[row] >= 0 && label[row] < columns), "label ", label[row],
             " is not below the number of logits, ", columns);
  double *loss = losses.data<double>(), *logarithm = logarithms.data<double>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    logarithm[row] = LogSumExp(from + row * columns, columns);
    loss[row] = label[row] == kIgnored ? 0.0 : logarithm[row] - from[row * columns + label[row]];
  }
  return {losses, logarithms};
}

std::vector<Tensor> CrossEntropyGrad(const Tensor& logits, const Tensor& labels,
                                     const Tensor& logarithms, const Tensor& upstream) {
  const int64_t columns = logits.shape().back(), rows = logits.numel() / columns;
  auto gradient = paddle::empty(logits.shape(), DataType::FLOAT32, logits.place());
  const float* from = logits.data<float>();
  const double *logarithm = logarithms.data<double>(), *factors = upstream.data<double>();
  const int64_t* label = labels.data<int64_t>();
  float* to = gradient.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float factor = label[row] == kIgnored ? 0.0 : factors[row];
    const float sum = logarithm[row], rest = logarithm[row] - sum;  // one float32 would lose digits of large logits
    if (factor == 0.0f) {
      std::fill_n(to + row * columns, columns, 0.0f);
      continue;
    }
    vector_math::Map(from + row * columns, columns, to + row * columns,
                 [&](Vector x) { return vector_math::Exp(x - sum - rest) * factor; });
    to[row * columns + label[row]] -= factor;
  }
  return {gradient};
}

std::vector<Shape> CrossEntropyShape(const Shape&, const Shape& labels) { return {labels, labels}; }
std::vector<DataType> CrossEntropyType(DataType, DataType) { return {DataType::FLOAT64, DataType::FLOAT64}; }

// ---- the tanh form of GELU: x s(x) with s(x) = 1 / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3) --------------

constexpr int64_t kStretch = 1 << 14;  // numbers that a thread processes at a time

template <class Of>
Tensor ForEach(const Tensor& x, const Of& of) {
  auto out = paddle::empty(x.shape(), x.dtype(), x.place());
  float* to = out.data<float>();
  const int64_t count = x.numel();
#pragma omp parallel for schedule(static)
  for (int64_t begin = 0; begin < count; begin += kStretch) of(begin, std::min(kStretch, count - begin), to + begin);
  return out;
}

std::vector<Tensor> Gelu(const Tensor& x) {
  PD_CHECK(x.is_cpu(), "this operator runs on a CPU");
  const float* from = x.data<float>();
  return {ForEach(x, [&](int64_t begin, int64_t count, float* to) {
    vector_math::Map(from + begin, count, to, [](Vector x) { return vector_math::GeluTanh(x); });
  })};
}

Vector GeluSlope(Vector x) {
  const Vector end = Vector{} + 64.0f;  // beyond, the slope is 0 or 1, and powers of x could overflow
  x = x < -end ? -end : x;
  x = x > end ? end : x;
  const Vector square = x * x, s = 1.0f / (1.0f + vector_math::Exp(-x * (1.59576912f + 0.0713548163f * square)));
  return s + x * s * (1.0f - s) * (1.59576912f + 0.214064449f * square);
}

std::vector<Tensor> GeluGrad(const Tensor& x, const Tensor& upstream) {
  return {ForEach(x, [from = x.data<float>(), up = upstream.data<float>()](int64_t begin, int64_t count, float* to) {
    int64_t i = begin;
    for (; i + kLanes <= begin + count; i += kLanes, to += kLanes)
      vector_math::Store(to, GeluSlope(vector_math::Load(from + i)) * vector_math::Load(up + i));
    const int64_t rest = begin + count - i;
    if (rest > 0)
      vector_math::StoreFirst(to, rest, GeluSlope(vector_math::LoadFirst(from + i, rest, 0.0f)) *
                                        vector_math::LoadFirst(up + i, rest, 0.0f));
  })};
}

// ---- the gradient of LayerNorm and RMSNorm -----------------------------------------------------------------------

// Rows whose sums one thread computes. The number is fixed, so that results do not depend on the number of threads.
constexpr int64_t kBlock = 32;

// Computes for a block of rows the gradient dx [rows, size] and the block's sums [size] for the gradients of weight
// and bias. With n the normalized row, r the inverse deviation and g = dy w: dx = r (g - [mean g] - n mean(g n)).
// Only LayerNorm has the term in brackets.
void NormGradOfRows(const float* x, const float* weight, const float* dy, int64_t rows, int64_t size, bool centered,
                    float epsilon, float* dx, float* of_weight, float* of_bias) {
  const auto mean = [size](const auto& value) {
    Vector sum = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) sum += value(vector_math::Load, i);
    const auto rest = [&](const float* from) { return vector_math::LoadFirst(from, size - i, 0.0f); };
    return (vector_math::Sum(sum) + (i < size ? vector_math::Sum(value(rest, i)) : 0.0f)) / size;
  };
  for (; rows > 0; --rows, x += size, dy += size, dx += size) {
    const vector_math::Moments moments(x, size, centered, epsilon);
    const float center = moments.mean, inverse = moments.inverse;
    const float average =
        centered ? mean([&](const auto& load, int64_t i) { return load(dy + i) * load(weight + i); }) : 0.0f;
    const float along = mean([&](const auto& load, int64_t i) {
                          return load(dy + i) * load(weight + i) * (load(x + i) - center);
                        }) * inverse;
    for (int64_t i = 0; i < size; ++i) {
      const float normal = (x[i] - center) * inverse;
      dx[i] = (dy[i] * weight[i] - average - normal * along) * inverse;
      of_weight[i] += dy[i] * normal;
      of_bias[i] += dy[i];
    }
  }
}

std::vector<Tensor> NormGrad(const Tensor& x, const Tensor& weight, const Tensor& dy, bool centered, float epsilon) {
  const int64_t size = weight.numel(), rows = x.numel() / size, blocks = (rows + kBlock - 1) / kBlock;
  PD_CHECK(x.is_cpu() && x.shape().back() == size && dy.numel() == x.numel(), "the gradient does not fit");
  auto dx = paddle::empty(x.shape(), x.dtype(), x.place());
  auto of_weight = paddle::empty({size}, x.dtype(), x.place()), of_bias = paddle::empty({size}, x.dtype(), x.place());
  std::vector<float> sums(2 * blocks * size);
  const float *from = x.data<float>(), *w = weight.data<float>(), *up = dy.data<float>();
  float* to = dx.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kBlock, begin = first * size;
    NormGradOfRows(from + begin, w, up + begin, std::min(kBlock, rows - first), size, centered, epsilon, to + begin,
                   &sums[2 * block * size], &sums[(2 * block + 1) * size]);
  }
  std::vector<double> totals(2 * size);  // float64, because there can be many blocks
  for (int64_t block = 0; block < 2 * blocks; ++block)
    for (int64_t i = 0; i < size; ++i) totals[block % 2 * size + i] += sums[block * size + i];
  std::copy_n(totals.begin(), size, of_weight.data<float>());
  std::copy_n(totals.begin() + size, size, of_bias.data<float>());
  return {dx, of_weight, of_bias};
}

std::vector<Shape> NormGradShape(const Shape& x, const Shape& weight, const Shape&) { return {x, weight, weight}; }
std::vector<DataType> NormGradType(DataType x, DataType, DataType) { return {x, x, x}; }

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

PD_BUILD_OP(ppfleetx_cross_entropy)
    .Inputs({"Logits", "Labels"})
    .Outputs({"Losses", "Logarithms"})
    .SetKernelFn(PD_KERNEL(CrossEntropy))
    .SetInferShapeFn(PD_INFER_SHAPE(CrossEntropyShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(CrossEntropyType));

PD_BUILD_GRAD_OP(ppfleetx_cross_entropy)
    .Inputs({"Logits", "Labels", "Logarithms", paddle::Grad("Losses")})
    .Outputs({paddle::Grad("Logits")})
    .SetKernelFn(PD_KERNEL(CrossEntropyGrad));

PD_BUILD_OP(ppfleetx_norm_backward)
    .Inputs({"X", "Weight", "Upstream"})
    .Outputs({"OfX", "OfWeight", "OfBias"})
    .Attrs({"centered: bool", "epsilon: float"})
    .SetKernelFn(PD_KERNEL(NormGrad))
    .SetInferShapeFn(PD_INFER_SHAPE(NormGradShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(NormGradType));

PD_BUILD_OP(ppfleetx_gelu)
    .Inputs({"X"})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(Gelu));  // the result has the shape and type of X

PD_BUILD_GRAD_OP(ppfleetx_gelu)
    .Inputs({"X", paddle::Grad("Out")})
    .Outputs({paddle::Grad("X")})
    .SetKernelFn(PD_KERNEL(GeluGrad));
