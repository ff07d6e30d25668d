// Products with matrices of 8 and 4 bits, for decoding on a CPU. What they compute is said in quantized.py.
//
// As in few_rows.h, a matrix comes in panels that are read once, from front to back, while the next piece is
// fetched. What is read is a quarter or an eighth; the numbers are widened in registers. Every sum is taken in
// the order of k, whatever the number of rows: a row's result does not depend on the rows beside it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace few_bits {

// PANEL_WIDTH is WIDTH of ops.py.
#if PANEL_WIDTH == 48
constexpr int kLanes = 16, kVectors = 3, kRows = 8;
#elif PANEL_WIDTH == 16
constexpr int kLanes = 8, kVectors = 2, kRows = 4;
#else
#error "no tile for panels of this width"
#endif
#if PANEL_WIDTH == 48 && defined(__AVX512F__) && defined(__AVX512BW__)
#define WITH_AVX512
#elif PANEL_WIDTH == 16 && defined(__AVX2__)
#define WITH_AVX2
#endif
constexpr int kWidth = kLanes * kVectors;
constexpr int kLine = 64;          // bytes of a cache line
constexpr int64_t kBlock = 8;      // of k, unrolled
constexpr int64_t kDepth = 256;    // of a piece of a panel, which stays in the first cache for all rows
constexpr int64_t kMostRows = 32;  // at a time
constexpr int64_t kMostInputs = 65536;  // 255 * 127 * k stays in 32 bits

using Vector = float __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));
using Integers = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(1), may_alias));
using Bytes = int8_t __attribute__((vector_size(kLanes), aligned(1), may_alias));
using Tile = Vector[kRows][kVectors];
using IntegerTile = Integers[kRows][kVectors];

// ---- how kBlock rows of a panel become floats ------------------------------------------------------------------

// Matrix of 8 bits: a block is [kBlock][kWidth] bytes.
struct EightBits {
  static constexpr bool kHasOffsets = false;
  static constexpr int64_t kBlockBytes = kBlock * kWidth;
  explicit EightBits(const int8_t* block) : block_(block) {}
  Vector Weights(int i, int v) const {
    const int8_t* from = block_ + i * kWidth + v * kLanes;
#if defined(WITH_AVX512)
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(WITH_AVX2)
    return (Vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Vector);
#endif
  }
  const int8_t* block_;
};

// Matrix of 4 bits: a block is [kWidth] words of 32 bits, each with kBlock numbers of one column, in the order
// of k from the lowest bits up, in two's complement.
struct FourBits {
  static constexpr bool kHasOffsets = false;
  static constexpr int64_t kBlockBytes = kWidth * 4;
  explicit FourBits(const int8_t* block) {
    for (int v = 0; v < kVectors; ++v) words_[v] = *reinterpret_cast<const Integers*>(block + v * kLanes * 4);
  }
  Vector Weights(int i, int v) const {
#if defined(WITH_AVX512)
    const __m512i word = (__m512i)words_[v], low = i < 4 ? word : _mm512_srli_epi32(word, 16);
    if (i % 4 == 0) {  // the instruction looks at the lowest four bits of each index
      const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
      return (Vector)_mm512_permutexvar_ps(low, table);
    }
    // The bits where they are, as the fraction of a number so large that they count ones; 8 is added and taken away.
    const int shift = i % 4 * 4;
    const __m512 large = _mm512_set1_ps(static_cast<float>((1 << (23 - shift)) + 8));
    const __m512i bits = _mm512_ternarylogic_epi32(_mm512_castps_si512(large), low, _mm512_set1_epi32(15 << shift),
                                                   0x78);  // a ^ (b & c)
    return (Vector)_mm512_sub_ps(_mm512_castsi512_ps(bits), large);
#else
    return __builtin_convertvector((words_[v] << (28 - 4 * i)) >> 28, Vector);
#endif
  }
  Integers words_[kVectors];
};

// The same; each group's offset is added to all its weights.
template <class Format>
struct WithOffsets : Format {
  static constexpr bool kHasOffsets = true;
  using Format::Format;
};

// kLanes numbers of 16 bits.
inline Vector Widen(const uint16_t* halves) {
#if defined(WITH_AVX512)
  return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)halves));
#elif defined(WITH_AVX2) && defined(__F16C__)
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)halves));
#else
  Vector wide;
  for (int i = 0; i < kLanes; ++i) {
    uint32_t bits = ((halves[i] & 0x7fffu) << 13) + (112u << 23);
    const bool is_small = (halves[i] & 0x7c00u) == 0;  // without a leading one: it is added, and taken away again
    if (is_small) bits += 1u << 23;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    if (is_small) number -= 6.103515625e-5f;  // 2^-14
    wide[i] = halves[i] >> 15 ? -number : number;
  }
  return wide;
#endif
}

// Without this, GCC widens the weights once more for each row.
inline Vector InRegister(Vector value) {
#if defined(WITH_AVX512) || defined(WITH_AVX2)
  asm("" : "+v"(value));
#endif
  return value;
}

// tile[R][kWidth] += x[R][blocks * kBlock] * panel, fetching `lines` from `ahead` on with every block.
template <class Format, int R>
void Accumulate(const float* x, int64_t stride, const int8_t* panel, int64_t blocks, const int8_t* ahead,
                int64_t lines, Vector (*tile)[kVectors]) {
  Vector sum[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = tile[r][v];
  for (; blocks > 0; --blocks, panel += Format::kBlockBytes, x += kBlock) {
    for (int64_t line = 0; line < lines; ++line, ahead += kLine) __builtin_prefetch(ahead);
    const Format block(panel);
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; ++i) {
      Vector weights[kVectors];
      for (int v = 0; v < kVectors; ++v) weights[v] = InRegister(block.Weights(i, v));
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v) sum[r][v] += x[r * stride + i] * weights[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) tile[r][v] = sum[r][v];
}

template <class Format, int R = kRows>
void AccumulateRows(int64_t rows, const float* x, int64_t stride, const int8_t* panel, int64_t blocks,
                    const int8_t* ahead, int64_t lines, Tile& tile) {
  if constexpr (R > 1) {
    if (rows < R) {
      AccumulateRows<Format, R - 1>(rows, x, stride, panel, blocks, ahead, lines, tile);
      return;
    }
  }
  Accumulate<Format, R>(x, stride, panel, blocks, ahead, lines, tile);
}

// What a product needs to know of one panel.
struct Panel {
  const int8_t* values;
  const float* scales;  // [groups][kWidth]; with offsets, [groups][2][kWidth] of 16 bits
  int64_t groups;
  const float* bias;    // of the panel's columns, or null
  int64_t columns;      // of them are wanted
  const float* x_sums;  // [rows][groups] of the numbers of x in each group, if there are offsets
};

// What a panel's group adds to its columns, for R rows: sums += parts * scale + x_sums * offset.
template <class Format, int R>
void AddGroup(const Panel& panel, int64_t group, int64_t row, const Vector (&parts)[R][kVectors],
              Vector (&sums)[R][kVectors], int64_t rows = R) {
  if constexpr (Format::kHasOffsets) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel.scales) + group * 2 * kWidth;
    for (int v = 0; v < kVectors; ++v) {
      const Vector scale = Widen(halves + v * kLanes), offset = Widen(halves + kWidth + v * kLanes);
      for (int64_t r = 0; r < rows; ++r)
        sums[r][v] += parts[r][v] * scale + panel.x_sums[(row + r) * panel.groups + group] * offset;
    }
  } else {
    const Vector* scales = reinterpret_cast<const Vector*>(panel.scales + group * kWidth);
    for (int64_t r = 0; r < rows; ++r)
      for (int v = 0; v < kVectors; ++v) sums[r][v] += parts[r][v] * scales[v];
  }
}

// The panel's columns of y for R rows of x, whose sums stay in registers.
template <class Format, int R>
void MultiplyPanelByFew(const float* x, int64_t size, const Panel& panel, float* y, int64_t stride) {
  constexpr int64_t kLines = Format::kBlockBytes / kLine, kAhead = 4096;
  Vector sums[R][kVectors];
  float start[kWidth] = {};
  if (panel.bias != nullptr) std::copy_n(panel.bias, panel.columns, start);
  for (int r = 0; r < R; ++r) std::memcpy(sums[r], start, sizeof start);
  const int8_t* values = panel.values;
  const int64_t blocks = size / panel.groups / kBlock;
  for (int64_t group = 0; group < panel.groups; ++group, x += blocks * kBlock) {
    Vector parts[R][kVectors] = {};
    Accumulate<Format, R>(x, size, values, blocks, values + kAhead, kLines, parts);
    values += blocks * Format::kBlockBytes;
    AddGroup<Format, R>(panel, group, 0, parts, sums);
  }
  for (int r = 0; r < R; ++r) std::memcpy(y + r * stride, sums[r], panel.columns * sizeof(float));
}

template <class Format, int R = kRows>
void MultiplyPanelByUpTo(const float* x, int64_t rows, int64_t size, const Panel& panel, float* y, int64_t stride) {
  if constexpr (R > 1) {
    if (rows < R) return MultiplyPanelByUpTo<Format, R - 1>(x, rows, size, panel, y, stride);
  }
  MultiplyPanelByFew<Format, R>(x, size, panel, y, stride);
}

// The panel's columns of y for up to kMostRows rows of x, which have `size` numbers.
template <class Format>
void MultiplyPanel(const float* x, int64_t rows, int64_t size, const Panel& panel, float* y, int64_t stride) {
  if (rows <= kRows) return MultiplyPanelByUpTo<Format>(x, rows, size, panel, y, stride);
  Tile sums[kMostRows / kRows], parts[kMostRows / kRows];
  const int64_t tiles = (rows + kRows - 1) / kRows;
  float start[kWidth] = {};
  if (panel.bias != nullptr) std::copy_n(panel.bias, panel.columns, start);
  for (int64_t row = 0; row < tiles * kRows; ++row)
    std::memcpy(sums[row / kRows][row % kRows], start, sizeof start);
  const int64_t depth = size / panel.groups;
  const int8_t* values = panel.values;
  // Each tile of rows fetches its part of the next piece.
  const int64_t lines = (Format::kBlockBytes / kLine + tiles - 1) / tiles;
  for (int64_t group = 0; group < panel.groups; ++group) {
    std::memset(parts, 0, tiles * sizeof(Tile));
    for (int64_t i = 0; i < depth; i += kDepth) {
      const int64_t blocks = std::min(kDepth, depth - i) / kBlock, bytes = blocks * Format::kBlockBytes;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = tile * kRows;
        AccumulateRows<Format>(std::min<int64_t>(kRows, rows - first), x + first * size + group * depth + i, size,
                               values, blocks, values + bytes + tile * (bytes / tiles), lines, parts[tile]);
      }
      values += bytes;
    }
    for (int64_t row = 0; row < rows; row += kRows)
      AddGroup<Format, kRows>(panel, group, row, parts[row / kRows], sums[row / kRows],
                              std::min<int64_t>(kRows, rows - row));
  }
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(y + row * stride, sums[row / kRows][row % kRows], panel.columns * sizeof(float));
}

// ---- products with activations of 8 bits -----------------------------------------------------------------------
//
// A panel is [k / 4][kWidth][4] bytes. Sums are those of integers, exact whatever instruction makes them.

constexpr int64_t kQuad = 4;  // of k in one word
#if (defined(WITH_AVX512) && defined(__AVX512VNNI__)) || (defined(WITH_AVX2) && defined(__AVXVNNI__))
#define WITH_VNNI
constexpr int kWordsOfQuad = 1;  // four bytes without sign, moved up by 128
#else
constexpr int kWordsOfQuad = 2;  // (first, third) and (second, fourth), in 16 bits each
#endif

inline Integers Broadcast(int32_t word) { return Integers{} + word; }

// One row of x on its own grid: words of quads to multiply with. Gives the scale; NaN where x has no grid.
inline float QuantizeRow(const float* x, int64_t size, int32_t* words) {
  constexpr int32_t kInfinity = 0x7f800000;
  int32_t largest = 0;  // of the magnitudes' bits, whose order is that of the numbers
  for (int64_t i = 0; i < size; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffff);
  }
  if (largest >= kInfinity) return std::nanf("");
  float scale;
  std::memcpy(&scale, &largest, sizeof scale);
  scale = std::max(scale / 127.0f, 1.17549435e-38f);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a float this large has an integer in its lowest bits
  const auto level = [&](float value) {
    const float moved = std::min(std::max(value / scale, -127.0f), 127.0f) + kRound;
    int32_t bits;
    std::memcpy(&bits, &moved, sizeof bits);
    return bits - 0x4b400000;
  };
  const int64_t padded = (size + kQuad - 1) / kQuad * kQuad;
#if defined(WITH_VNNI)
  auto* bytes = reinterpret_cast<uint8_t*>(words);
  for (int64_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(level(x[i]) + 128);
  std::fill(bytes + size, bytes + padded, uint8_t{128});
#else
  auto* halves = reinterpret_cast<int16_t*>(words);
  std::fill_n(halves, padded, int16_t{0});
  for (int64_t i = 0; i < size; ++i)  // of each quad: first, third, second, fourth
    halves[(i & ~int64_t{3}) + ((i & 1) << 1) + ((i >> 1) & 1)] = static_cast<int16_t>(level(x[i]));
#endif
  return scale;
}

#if defined(WITH_VNNI)
inline Integers AddProducts(Integers sum, Integers activations, Integers weights) {
#if defined(WITH_AVX512)
  return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)activations, (__m512i)weights);
#else
  return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)activations, (__m256i)weights);
#endif
}
#else
inline Integers AddPairs(Integers sum, Integers activations, Integers weights) {
#if defined(WITH_AVX512)
  return sum + (Integers)_mm512_madd_epi16((__m512i)activations, (__m512i)weights);
#elif defined(WITH_AVX2)
  return sum + (Integers)_mm256_madd_epi16((__m256i)activations, (__m256i)weights);
#else
  return sum + ((activations << 16) >> 16) * ((weights << 16) >> 16) + (activations >> 16) * (weights >> 16);
#endif
}
inline Integers Evens(Integers weights) {  // bytes 0 and 2 of each word, in 16 bits each
  return (((weights << 24) >> 24) & 0xffff) | (((weights << 8) >> 24) << 16);
}
inline Integers Odds(Integers weights) {  // bytes 1 and 3
  return (((weights << 16) >> 24) & 0xffff) | ((weights >> 24) << 16);
}
#endif

template <int R>
void AccumulateIntegers(const int32_t* x, int64_t stride, const int8_t* panel, int64_t quads, const int8_t* ahead,
                        int64_t lines, IntegerTile& tile) {
  Integers sum[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = tile[r][v];
#if defined(WITH_VNNI)
  Integers moved[kVectors] = {};  // by which the sums are too large: 128 times those of the weights
#endif
  for (int64_t quad = 0; quad < quads; ++quad, panel += kWidth * kQuad, x += kWordsOfQuad) {
    for (int64_t line = 0; line < lines; ++line, ahead += kLine) __builtin_prefetch(ahead);
    for (int v = 0; v < kVectors; ++v) {
      const Integers weights = *reinterpret_cast<const Integers*>(panel + v * kLanes * kQuad);
#if defined(WITH_VNNI)
      moved[v] = AddProducts(moved[v], Broadcast(0x80808080), weights);
      for (int r = 0; r < R; ++r) sum[r][v] = AddProducts(sum[r][v], Broadcast(x[r * stride]), weights);
#else
      const Integers evens = Evens(weights), odds = Odds(weights);
      for (int r = 0; r < R; ++r) {
        sum[r][v] = AddPairs(sum[r][v], Broadcast(x[r * stride]), evens);
        sum[r][v] = AddPairs(sum[r][v], Broadcast(x[r * stride + 1]), odds);
      }
#endif
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) {
#if defined(WITH_VNNI)
      sum[r][v] -= moved[v];
#endif
      tile[r][v] = sum[r][v];
    }
}

template <int R = kRows>
void AccumulateIntegerRows(int64_t rows, const int32_t* x, int64_t stride, const int8_t* panel, int64_t quads,
                           const int8_t* ahead, int64_t lines, IntegerTile& tile) {
  if constexpr (R > 1) {
    if (rows < R) {
      AccumulateIntegerRows<R - 1>(rows, x, stride, panel, quads, ahead, lines, tile);
      return;
    }
  }
  AccumulateIntegers<R>(x, stride, panel, quads, ahead, lines, tile);
}

// `x` are the words of rows with `quads` quads, and their scales.
inline void MultiplyIntegerPanel(const int32_t* x, const float* x_scales, int64_t rows, int64_t quads, const Panel& panel,
                          float* y, int64_t stride) {
  IntegerTile tiles[kMostRows / kRows];
  const int64_t count = (rows + kRows - 1) / kRows, words = quads * kWordsOfQuad;
  std::memset(tiles, 0, count * sizeof(IntegerTile));
  const int64_t lines = (kWidth * kQuad / kLine + count - 1) / count;
  for (int64_t i = 0; i < quads; i += kDepth / kQuad) {
    const int64_t depth = std::min(kDepth / kQuad, quads - i), bytes = depth * kWidth * kQuad;
    const int8_t* piece = panel.values + i * kWidth * kQuad;
    for (int64_t tile = 0; tile < count; ++tile) {
      const int64_t first = tile * kRows;
      AccumulateIntegerRows(std::min<int64_t>(kRows, rows - first), x + first * words + i * kWordsOfQuad, words,
                            piece, depth, piece + bytes + tile * (bytes / count), lines, tiles[tile]);
    }
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < panel.columns; ++column) {
      const int32_t sum = tiles[row / kRows][row % kRows][column / kLanes][column % kLanes];
      const float start = panel.bias == nullptr ? 0.0f : panel.bias[column];
      y[row * stride + column] = start + static_cast<float>(sum) * (x_scales[row] * panel.scales[column]);
    }
}

// ---- products on all threads -------------------------------------------------------------------------------------

// A matrix [size][columns] in panels, which are as long as its format makes them.
struct Matrix {
  const int8_t* values;
  const float* scales;  // [panels][groups][kWidth]; with offsets, [panels][groups][2][kWidth] of 16 bits
  const float* bias;    // or null
  int64_t size, columns, groups;
  bool has_offsets = false;
  // From data [panels][count][kWidth].
  void SetScales(const void* data, int64_t count, bool are_halves) {
    scales = static_cast<const float*>(data);
    groups = are_halves ? count / 2 : count;
    has_offsets = are_halves;
  }
  int64_t Panels() const { return (columns + kWidth - 1) / kWidth; }
  Panel At(int64_t p, int64_t bytes) const {
    const int64_t first = p * kWidth;
    return {values + p * bytes, scales + p * groups * kWidth, groups, bias ? bias + first : nullptr,
            std::min<int64_t>(kWidth, columns - first), nullptr};
  }
};

// The sums of x[rows][groups][depth], with `depth` a multiple of kBlock.
inline std::vector<float> SumsOfGroups(const float* x, int64_t rows, int64_t groups, int64_t depth) {
  std::vector<float> sums(rows * groups);
  for (float& sum : sums) {
    float parts[kBlock] = {};
    for (const float* end = x + depth; x < end; x += kBlock)
      for (int i = 0; i < kBlock; ++i) parts[i] += x[i];
    for (const float part : parts) sum += part;
  }
  return sums;
}

// y[rows][columns] = x[rows][size] matrix + bias.
template <class Format>
void Product(const float* x, int64_t rows, const Matrix& matrix, float* y) {
  const int64_t size = matrix.size, padded = (size + kBlock - 1) / kBlock * kBlock;
  std::vector<float> copy;
  if (padded != size) {  // what is read beyond a row's end must be a number
    copy.resize(rows * padded);
    for (int64_t row = 0; row < rows; ++row) std::copy_n(x + row * size, size, copy.data() + row * padded);
    x = copy.data();
  }
  std::vector<float> x_sums;
  if (Format::kHasOffsets) x_sums = SumsOfGroups(x, rows, matrix.groups, padded / matrix.groups);
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < matrix.Panels(); ++p) {
    Panel panel = matrix.At(p, padded / kBlock * Format::kBlockBytes);
    for (int64_t row = 0; row < rows; row += kMostRows) {
      panel.x_sums = x_sums.data() + row * matrix.groups;
      MultiplyPanel<Format>(x + row * padded, std::min(kMostRows, rows - row), padded, panel,
                            y + row * matrix.columns + p * kWidth, matrix.columns);
    }
  }
}

// The same, with offsets if the matrix has them.
template <class Format>
void ProductOf(const float* x, int64_t rows, const Matrix& matrix, float* y) {
  if (matrix.has_offsets) Product<WithOffsets<Format>>(x, rows, matrix, y);
  else Product<Format>(x, rows, matrix, y);
}

// The same with each row of x on its own grid of 8 bits, and the panels of 8 bits in quads.
inline void IntegerProduct(const float* x, int64_t rows, const Matrix& matrix, float* y) {
  const int64_t quads = (matrix.size + kQuad - 1) / kQuad, words = quads * kWordsOfQuad;
  std::vector<int32_t> activations(rows * words);
  std::vector<float> scales(rows);
  for (int64_t row = 0; row < rows; ++row)
    scales[row] = QuantizeRow(x + row * matrix.size, matrix.size, activations.data() + row * words);
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < matrix.Panels(); ++p) {
    const Panel panel = matrix.At(p, quads * kWidth * kQuad);
    for (int64_t row = 0; row < rows; row += kMostRows)
      MultiplyIntegerPanel(activations.data() + row * words, scales.data() + row, std::min(kMostRows, rows - row),
                           quads, panel, y + row * matrix.columns + p * kWidth, matrix.columns);
  }
}

}  // namespace few_bits
