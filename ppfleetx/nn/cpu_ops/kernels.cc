// Operators for decoding on a CPU. What they compute is said in ops.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"

namespace {

// ---- few_rows: y = x W + b for few rows of x and a large constant matrix W ------------------------------------
//
// With few rows a product is bound by how fast the CPU reads W, once. W comes in panels, [p][k][kWidth], that
// are read from front to back; while one piece of a panel is multiplied with all rows, the next is fetched.
// (A library that packs W reads it three times; one that does not fetch ahead waits at every page.)
//
// Every sum is taken in the order of k, whatever the number of rows: a row's result does not depend on the
// rows beside it.

// A tile of sums, kRows x kWidth, fills the registers: 24 of 32 with AVX-512, 8 of 16 otherwise (twice as many
// would leave none for W). PANEL_WIDTH is WIDTH of ops.py.
#if PANEL_WIDTH == 48
constexpr int kLanes = 16, kVectors = 3, kRows = 8;
#ifdef __AVX512F__
#define VECTORS_FIT_REGISTERS
#endif
#elif PANEL_WIDTH == 16
constexpr int kLanes = 8, kVectors = 2, kRows = 4;
#ifdef __AVX__
#define VECTORS_FIT_REGISTERS
#endif
#else
#error "no tile for panels of this width"
#endif
constexpr int kWidth = kLanes * kVectors;
constexpr int kLine = 16;        // floats of a cache line
constexpr int64_t kSteps = 4;    // unrolled
constexpr int64_t kDepth = 128;  // of a piece of a panel, which stays in the first cache for all rows
constexpr int64_t kMostRows = 32;  // at a time

using Vector = float __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));
using Tile = Vector[kRows][kVectors];

// Without this, GCC reads the weights from memory once more for each row.
inline Vector InRegister(Vector value) {
#ifdef VECTORS_FIT_REGISTERS
  asm("" : "+v"(value));
#endif
  return value;
}

// tile[R][kWidth] += x[R][depth] * w[depth][kWidth], fetching `lines` from `ahead` on with every kSteps of depth.
template <int R>
void Accumulate(const float* x, int64_t stride, const float* w, int64_t depth, const float* ahead, int64_t lines,
                Tile& tile) {
  Vector sum[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = tile[r][v];
  const auto step = [&](int64_t i) {
    Vector weights[kVectors];
    for (int v = 0; v < kVectors; ++v)
      weights[v] = InRegister(*reinterpret_cast<const Vector*>(w + i * kWidth + v * kLanes));
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) sum[r][v] += x[r * stride + i] * weights[v];
  };
  int64_t i = 0;
  for (; i + kSteps <= depth; i += kSteps) {
    for (int64_t line = 0; line < lines; ++line, ahead += kLine) __builtin_prefetch(ahead);
    for (int64_t j = 0; j < kSteps; ++j) step(i + j);
  }
  for (; i < depth; ++i) step(i);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) tile[r][v] = sum[r][v];
}

template <int R = kRows>
void AccumulateRows(int64_t rows, const float* x, int64_t stride, const float* w, int64_t depth,
                    const float* ahead, int64_t lines, Tile& tile) {
  if constexpr (R > 1) {
    if (rows < R) {
      AccumulateRows<R - 1>(rows, x, stride, w, depth, ahead, lines, tile);
      return;
    }
  }
  Accumulate<R>(x, stride, w, depth, ahead, lines, tile);
}

// One panel's columns of y for up to kMostRows rows; `columns` of them are wanted.
void MultiplyPanel(const float* x, int64_t rows, int64_t size, const float* panel, const float* bias,
                   int64_t columns, float* y, int64_t stride) {
  Tile tiles[kMostRows / kRows];
  const int64_t groups = (rows + kRows - 1) / kRows;
  float start[kWidth] = {};
  if (bias != nullptr) std::copy_n(bias, columns, start);
  for (int64_t row = 0; row < groups * kRows; ++row)
    std::copy_n(start, kWidth, reinterpret_cast<float*>(tiles[row / kRows][row % kRows]));
  // Each group of rows fetches its part of the next piece.
  const int64_t lines = (kSteps * kWidth / kLine + groups - 1) / groups;
  for (int64_t i = 0; i < size; i += kDepth) {
    const int64_t depth = std::min(kDepth, size - i);
    const float* piece = panel + i * kWidth;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = group * kRows;
      const float* ahead = piece + depth * kWidth + group * (depth * kWidth / groups);
      AccumulateRows(std::min<int64_t>(kRows, rows - first), x + first * size + i, size, piece, depth, ahead,
                     lines, tiles[group]);
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    std::copy_n(reinterpret_cast<const float*>(tiles[row / kRows][row % kRows]), columns, y + row * stride);
}

std::vector<paddle::Tensor> FewRows(const paddle::Tensor& x, const paddle::Tensor& panels,
                                    const paddle::optional<paddle::Tensor>& bias, int64_t columns) {
  auto shape = x.shape();
  const int64_t size = shape.back(), rows = x.numel() / size;
  const int64_t num_panels = panels.shape()[0];
  PD_CHECK(x.is_cpu() && panels.is_cpu(), "this operator runs on a CPU");
  PD_CHECK(panels.shape()[2] == kWidth && panels.shape()[1] == size &&
               num_panels == (columns + kWidth - 1) / kWidth && (!bias || bias->numel() == columns),
           "panels do not fit");
  shape.back() = columns;
  auto out = paddle::empty(shape, x.dtype(), x.place());
  const float *from = x.data<float>(), *weights = panels.data<float>();
  const float* start = bias ? bias->data<float>() : nullptr;
  float* to = out.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < num_panels; ++p) {
    const int64_t first = p * kWidth;
    for (int64_t row = 0; row < rows; row += kMostRows)
      MultiplyPanel(from + row * size, std::min(kMostRows, rows - row), size, weights + p * size * kWidth,
                    start ? start + first : nullptr, std::min<int64_t>(kWidth, columns - first),
                    to + row * columns + first, columns);
  }
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

PD_BUILD_OP(ppfleetx_nucleus)
    .Inputs({"Probabilities", "TopP"})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(Nucleus))
    .SetInferShapeFn(PD_INFER_SHAPE(NucleusShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(NucleusType));
