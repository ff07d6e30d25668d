// y = x W + b in float32, for few rows of x and a large constant matrix W. See ops.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace few_rows {

// With few rows, the speed of a product is limited by the memory bandwidth for W, which is read only once. W is
// stored in panels, [p][k][kWidth], which are read sequentially. While all rows are multiplied by one piece of a
// panel, the next piece is prefetched. (A library that packs W reads it three times; a library that does not
// prefetch waits at every page.)
//
// Every sum is computed in the order of k, for any number of rows. A row's result therefore does not depend on the
// other rows.

// A tile of sums, kRows x kWidth, occupies 24 of 32 registers with AVX-512, and 8 of 16 otherwise (a tile of twice
// the size would leave no registers for W). PANEL_WIDTH is WIDTH in compiled.py.
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
constexpr int64_t kSteps = 4;    // steps of k in one unrolled iteration
constexpr int64_t kDepth = 128;  // length along k of a piece of a panel, which stays in the L1 cache for all rows
constexpr int64_t kMostRows = 32;  // rows that are multiplied at a time
constexpr int64_t kFewest = 6;     // largest number of rows for which no panels are copied out of W

using Vector = float __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));
using Tile = Vector[kRows][kVectors];

// Keeps a value in a register. Without this, GCC reads the weights from memory again for each row.
inline Vector InRegister(Vector value) {
#ifdef VECTORS_FIT_REGISTERS
  asm("" : "+v"(value));
#endif
  return value;
}

// Computes tile[R][kWidth] += x[R][depth] * w[depth][kWidth]. Every kSteps steps, `lines` further cache lines are
// prefetched, starting at `ahead`.
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

// Calls of(rows) with the number of rows, at most kRows, as a compile-time constant.
template <int R = kRows, class Of>
void WithRows(int64_t rows, const Of& of) {
  if constexpr (R > 1) {
    if (rows < R) return WithRows<R - 1>(rows, of);
  }
  of(std::integral_constant<int, R>{});
}

// Computes the columns of y that belong to one panel, for up to kMostRows rows. Only the first `columns` columns of
// the panel are written.
inline void MultiplyPanel(const float* x, int64_t rows, int64_t size, const float* panel, const float* bias,
                   int64_t columns, float* y, int64_t stride) {
  Tile tiles[kMostRows / kRows];
  const int64_t groups = (rows + kRows - 1) / kRows;
  float start[kWidth] = {};
  if (bias != nullptr) std::copy_n(bias, columns, start);
  for (int64_t row = 0; row < groups * kRows; ++row)
    std::copy_n(start, kWidth, reinterpret_cast<float*>(tiles[row / kRows][row % kRows]));
  // Each group of rows prefetches its part of the next piece.
  const int64_t lines = (kSteps * kWidth / kLine + groups - 1) / groups;
  for (int64_t i = 0; i < size; i += kDepth) {
    const int64_t depth = std::min(kDepth, size - i);
    const float* piece = panel + i * kWidth;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = group * kRows;
      const float* ahead = piece + depth * kWidth + group * (depth * kWidth / groups);
      WithRows(rows - first, [&](auto count) {
        Accumulate<count>(x + first * size + i, size, piece, depth, ahead, lines, tiles[group]);
      });
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    std::copy_n(reinterpret_cast<const float*>(tiles[row / kRows][row % kRows]), columns, y + row * stride);
}

// Computes y[rows][columns] = x[rows][size] W + b on all threads, with W in panels.
inline void Product(const float* x, int64_t rows, int64_t size, const float* panels, const float* bias,
                    int64_t columns, float* y) {
  const int64_t num_panels = (columns + kWidth - 1) / kWidth;
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < num_panels; ++p) {
    const int64_t first = p * kWidth;
    for (int64_t row = 0; row < rows; row += kMostRows)
      MultiplyPanel(x + row * size, std::min(kMostRows, rows - row), size, panels + p * size * kWidth,
                    bias ? bias + first : nullptr, std::min<int64_t>(kWidth, columns - first),
                    y + row * columns + first, columns);
  }
}

// Computes to[count] += x[R] * w[R][count], where the rows of w are `columns` apart. They are read in parallel, because
// a core reads several memory streams faster than a single one.
template <int R>
void AddRows(const float* x, const float* w, int64_t columns, int64_t count, float* to) {
  Vector factors[R];
  for (int r = 0; r < R; ++r) factors[r] = x[r] - Vector{};  // in a register
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    auto& sum = *reinterpret_cast<Vector*>(to + i);
    Vector value = sum;
    for (int r = 0; r < R; ++r) value += factors[r] * *reinterpret_cast<const Vector*>(w + r * columns + i);
    sum = value;
  }
  for (; i < count; ++i)
    for (int r = 0; r < R; ++r) to[i] += x[r] * w[r * columns + i];
}

// Computes to[row][begin, end) += x[row][R] * w[R][begin, end). For several rows, columns are taken in pieces that stay
// in the L1 cache.
template <int R>
void AddRowsOf(const float* x, int64_t rows, int64_t size, const float* w, int64_t columns, int64_t begin, int64_t end,
               float* to) {
  const int64_t width = rows == 1 ? end - begin : 512;
  for (int64_t piece = begin; piece < end; piece += width)
    for (int64_t row = 0; row < rows; ++row)
      AddRows<R>(x + row * size, w + piece, columns, std::min(width, end - piece), to + row * columns + piece);
}

// Computes y[rows][columns] = x[rows][size] W + b on all threads, for few rows. W is not in panels, but is stored as
// [size][columns].
inline void WholeProduct(const float* x, int64_t rows, int64_t size, const float* w, const float* bias,
                         int64_t columns, float* y) {
  constexpr int kStreams = 5;  // more rows, multiples of 4 KiB apart, compete for places in the L1 cache
  constexpr int64_t kPiece = 16 * kLanes;  // columns; each thread gets a whole number of pieces
  const int64_t pieces = (columns + kPiece - 1) / kPiece;
#pragma omp parallel
  {
#ifdef _OPENMP
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
#else
    const int64_t threads = 1, thread = 0;
#endif
    const int64_t begin = pieces * thread / threads * kPiece;
    const int64_t end = std::min(columns, pieces * (thread + 1) / threads * kPiece);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = begin; i < end; ++i) y[row * columns + i] = bias ? bias[i] : 0.0f;
    int64_t k = 0;
    for (; k + kStreams <= size; k += kStreams)
      AddRowsOf<kStreams>(x + k, rows, size, w + k * columns, columns, begin, end, y);
    for (; k < size; ++k) AddRowsOf<1>(x + k, rows, size, w + k * columns, columns, begin, end, y);
  }
}

// Computes y = x W, without a bias, for more rows: each panel is copied out of W and used for all rows.
inline void CopiedProduct(const float* x, int64_t rows, int64_t size, const float* w, int64_t columns, float* y) {
  const int64_t num_panels = (columns + kWidth - 1) / kWidth;
#pragma omp parallel
  {
    thread_local std::vector<float> panel;  // reused, because new memory would take as long as the copy
    if (static_cast<int64_t>(panel.size()) < size * kWidth) panel.resize(size * kWidth);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < num_panels; ++p) {
      const int64_t first = p * kWidth, width = std::min<int64_t>(kWidth, columns - first);
      for (int64_t k = 0; k < size; ++k) {
        const float* from = w + k * columns + first;
        float* to = panel.data() + k * kWidth;
        if (width == kWidth)
          std::copy_n(from, kWidth, to);  // of constant size, so the compiler inlines the copy
        else
          std::copy_n(from, width, to);
      }
      for (int64_t row = 0; row < rows; row += kMostRows)
        MultiplyPanel(x + row * size, std::min(kMostRows, rows - row), size, panel.data(), nullptr, width,
                      y + row * columns + first, columns);
    }
  }
}

// Multiplies each row of x by the matrix of its group, w[g], and w is [groups][size][columns]. The rows are sorted by
// group; group g has counts[g] rows.
inline void GroupedProduct(const float* x, const int64_t* counts, int64_t groups, int64_t size, const float* w,
                           int64_t columns, float* y) {
  for (int64_t g = 0; g < groups; ++g, w += size * columns) {
    const int64_t rows = counts[g];
    if (rows > kFewest)
      CopiedProduct(x, rows, size, w, columns, y);
    else if (rows > 0)
      WholeProduct(x, rows, size, w, nullptr, columns, y);
    x += rows * size;
    y += rows * columns;
  }
}

}  // namespace few_rows
