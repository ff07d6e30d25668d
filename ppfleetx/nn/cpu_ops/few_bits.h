// Products with matrices of 8 and 4 bits, for decoding on a CPU. They are documented in quantized.py.
//
// As in few_rows.h, a matrix is stored in panels, which are read once and sequentially while the next piece is
// prefetched. For one row, several panels are read in parallel where possible. The weights take a quarter or an
// eighth of the memory of float32, and are converted in registers. Every sum is computed in the order of k, for any
// number of rows. A row's result therefore does not depend on the other rows.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "few_rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace few_bits {

using few_rows::InRegister, few_rows::Tile, few_rows::Vector, few_rows::WithRows;
using few_rows::kLanes, few_rows::kMostRows, few_rows::kRows, few_rows::kVectors, few_rows::kWidth;

#if PANEL_WIDTH == 48 && defined(__AVX512F__) && defined(__AVX512BW__)
#define WITH_AVX512
#elif PANEL_WIDTH == 16 && defined(__AVX2__)
#define WITH_AVX2
#endif
constexpr int kLine = 64;          // bytes of a cache line
constexpr int64_t kBlock = 8;      // steps of k in one unrolled iteration
constexpr int64_t kDepth = 256;    // length along k of a piece of a panel, which stays in the L1 cache for all rows
constexpr int64_t kMostInputs = 65536;  // 255 * 127 * k stays in 32 bits

using Integers = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(1), may_alias));
using Bytes = int8_t __attribute__((vector_size(kLanes), aligned(1), may_alias));

// ---- conversion of kBlock rows of a panel (a block) to floats --------------------------------------------------

// A matrix of 8 bits. A block is [kBlock][kWidth] bytes.
struct EightBits {
  using Stored = int8_t;
  static constexpr bool kHasOffsets = false, kRounds = false;
  static constexpr int kSideBySide = 4;  // panels read in parallel for one row, if groups are kShortest or longer
  static constexpr int64_t kShortest = kBlock;
  static constexpr int64_t kUnit = kBlock, kUnitBytes = kBlock * kWidth;
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

// A matrix of 4 bits. A block is [kWidth] words of 32 bits. Each word holds kBlock numbers of one column in two's
// complement, in the order of k, beginning at the lowest bits.
struct FourBits {
  using Stored = uint8_t;
  static constexpr bool kHasOffsets = false, kRounds = false;
  static constexpr int kSideBySide = 2;
  static constexpr int64_t kShortest = 64;
  static constexpr int64_t kUnit = kBlock, kUnitBytes = kWidth * 4;
  explicit FourBits(const int8_t* block) {
    for (int v = 0; v < kVectors; ++v) words_[v] = *reinterpret_cast<const Integers*>(block + v * kLanes * 4);
  }
  Vector Weights(int i, int v) const {
#if defined(WITH_AVX512)
    const __m512i word = (__m512i)words_[v], low = i < 4 ? word : _mm512_srli_epi32(word, 16);
    if (i % 4 == 0) {  // the instruction uses only the lowest four bits of each index
      const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
      return (Vector)_mm512_permutexvar_ps(low, table);
    }
    // Leave the bits in place, as part of the fraction of a number so large that their lowest bit has the value 1.
    // 8 is added and subtracted to get signed values.
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

// The same format with offsets: the offset of a group is added to all its weights.
template <class Format>
struct WithOffsets : Format {
  static constexpr bool kHasOffsets = true;
  using Format::Format;
};

// Converts kLanes float16 numbers to float32.
inline Vector Widen(const uint16_t* halves) {
#if defined(WITH_AVX512)
  return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)halves));
#elif defined(WITH_AVX2) && defined(__F16C__)
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)halves));
#else
  Vector wide;
  for (int i = 0; i < kLanes; ++i) {
    uint32_t bits = ((halves[i] & 0x7fffu) << 13) + (112u << 23);
    const bool is_small = (halves[i] & 0x7c00u) == 0;  // subnormal: a leading one is added here and subtracted below
    if (is_small) bits += 1u << 23;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    if (is_small) number -= 6.103515625e-5f;  // 2^-14
    wide[i] = halves[i] >> 15 ? -number : number;
  }
  return wide;
#endif
}

// Computes tile[R][kWidth] += x[R][blocks * kBlock] * panel. With every block, `lines` further cache lines are
// prefetched, starting at `ahead`.
template <class Format, int R>
void Accumulate(const float* x, int64_t stride, const int8_t* panel, int64_t blocks, const int8_t* ahead,
                int64_t lines, Vector (*tile)[kVectors]) {
  Vector sum[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = tile[r][v];
  for (; blocks > 0; --blocks, panel += Format::kUnitBytes, x += kBlock) {
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

// One panel of a matrix, and the other inputs of its product.
struct Panel {
  const int8_t* values;
  const float* scales;  // [groups][kWidth]; with offsets, [groups][2][kWidth] in float16
  int64_t groups;
  const float* bias;    // of the panel's columns, or null
  int64_t columns;      // number of the panel's columns that are not padding
  const float* x_sums;  // [rows][groups], sums of the numbers of x in each group; only with offsets
};

// Adds a group's products to the sums of a panel's columns, for R rows: sums += parts * scale + x_sums * offset.
template <class Format, int R>
inline __attribute__((always_inline)) void AddGroup(const Panel& panel, int64_t group, int64_t row,
                                                    const Vector (&parts)[R][kVectors], Vector (&sums)[R][kVectors],
                                                    int64_t rows = R) {
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

// Computes the panel's columns of y for R rows of x. The sums stay in registers.
template <class Format, int R>
void MultiplyPanelByFew(const float* x, int64_t size, const Panel& panel, float* y, int64_t stride) {
  constexpr int64_t kLines = Format::kUnitBytes / kLine, kAhead = 4096;
  Vector sums[R][kVectors];
  float start[kWidth] = {};
  if (panel.bias != nullptr) std::copy_n(panel.bias, panel.columns, start);
  for (int r = 0; r < R; ++r) std::memcpy(sums[r], start, sizeof start);
  const int8_t* values = panel.values;
  const int64_t blocks = size / panel.groups / kBlock;
  for (int64_t group = 0; group < panel.groups; ++group, x += blocks * kBlock) {
    Vector parts[R][kVectors] = {};
    Accumulate<Format, R>(x, size, values, blocks, values + kAhead, kLines, parts);
    values += blocks * Format::kUnitBytes;
    AddGroup<Format, R>(panel, group, 0, parts, sums);
  }
  for (int r = 0; r < R; ++r) std::memcpy(y + r * stride, sums[r], panel.columns * sizeof(float));
}

// Computes the columns of y that belong to P panels, for one row of x. P panels are faster than one at a time: in a
// single panel, each addition would wait for the one before, and a core reads several memory streams faster than one.
template <class Format, int P>
void MultiplyPanelsByOne(const float* x, int64_t size, const Panel (&panels)[P], float* y) {
  Vector sums[P][1][kVectors];
  for (int p = 0; p < P; ++p) {
    float start[kWidth] = {};
    if (panels[p].bias != nullptr) std::copy_n(panels[p].bias, panels[p].columns, start);
    std::memcpy(sums[p], start, sizeof start);
  }
  const int64_t groups = panels[0].groups, blocks = size / groups / kBlock;
  int64_t place = 0;
  for (int64_t group = 0; group < groups; ++group) {
    Vector parts[P][1][kVectors] = {};
    for (int64_t end = place + blocks * Format::kUnitBytes; place < end; place += Format::kUnitBytes, x += kBlock) {
#pragma GCC unroll 8
      for (int i = 0; i < kBlock; ++i)
        for (int p = 0; p < P; ++p) {
          const Format block(panels[p].values + place);
          for (int v = 0; v < kVectors; ++v) parts[p][0][v] += x[i] * InRegister(block.Weights(i, v));
        }
    }
    for (int p = 0; p < P; ++p) AddGroup<Format, 1>(panels[p], group, 0, parts[p], sums[p]);
  }
  for (int p = 0; p < P; ++p) std::memcpy(y + p * kWidth, sums[p], panels[p].columns * sizeof(float));
}

// Computes the panel's columns of y for up to kMostRows rows of x. A row has `size` numbers.
template <class Format>
void MultiplyPanel(const float* x, int64_t rows, int64_t size, const Panel& panel, float* y, int64_t stride) {
  if (rows <= kRows)
    return WithRows(rows, [&](auto count) { MultiplyPanelByFew<Format, count>(x, size, panel, y, stride); });
  Tile sums[kMostRows / kRows], parts[kMostRows / kRows];
  const int64_t tiles = (rows + kRows - 1) / kRows;
  float start[kWidth] = {};
  if (panel.bias != nullptr) std::copy_n(panel.bias, panel.columns, start);
  for (int64_t row = 0; row < tiles * kRows; ++row)
    std::memcpy(sums[row / kRows][row % kRows], start, sizeof start);
  const int64_t depth = size / panel.groups;
  const int8_t* values = panel.values;
  // Each tile of rows prefetches its part of the next piece.
  const int64_t lines = (Format::kUnitBytes / kLine + tiles - 1) / tiles;
  for (int64_t group = 0; group < panel.groups; ++group) {
    std::memset(parts, 0, tiles * sizeof(Tile));
    for (int64_t i = 0; i < depth; i += kDepth) {
      const int64_t blocks = std::min(kDepth, depth - i) / kBlock, bytes = blocks * Format::kUnitBytes;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = tile * kRows;
        const int8_t* ahead = values + bytes + tile * (bytes / tiles);
        WithRows(rows - first, [&](auto count) {
          Accumulate<Format, count>(x + first * size + group * depth + i, size, values, blocks, ahead, lines,
                                    parts[tile]);
        });
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
// The numbers of a row of x in a group share one scale. Sums within a group are sums of integers, so they are exact
// with every instruction set.

constexpr int64_t kQuad = 4;  // steps of k in one 32-bit word
#if (defined(WITH_AVX512) && defined(__AVX512VNNI__)) || (defined(WITH_AVX2) && defined(__AVXVNNI__))
#define WITH_VNNI
#endif
using Halves = int16_t __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(1), may_alias));

inline Integers Broadcast(int32_t word) { return Integers{} + word; }

// Adds the products of unsigned bytes and signed bytes, four per 32-bit sum.
#if defined(WITH_VNNI)
inline Integers AddProducts(Integers sum, Integers unsigned_bytes, Integers bytes) {
#if defined(WITH_AVX512)
  return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)bytes);
#else
  return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)unsigned_bytes, (__m256i)bytes);
#endif
}
#elif defined(WITH_AVX512) || defined(WITH_AVX2)
// Adds the products of unsigned bytes and signed bytes, two per 16-bit sum.
inline Halves AddProductsOfBytes(Halves sum, Integers unsigned_bytes, Integers bytes) {
#if defined(WITH_AVX512)
  return sum + (Halves)_mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)bytes);
#else
  return sum + (Halves)_mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)bytes);
#endif
}
#endif

// Adds the products of 16-bit numbers, two per 32-bit sum.
inline Integers AddPairs(Integers sum, Integers activations, Integers weights) {
#if defined(WITH_AVX512)
  return sum + (Integers)_mm512_madd_epi16((__m512i)activations, (__m512i)weights);
#elif defined(WITH_AVX2)
  return sum + (Integers)_mm256_madd_epi16((__m256i)activations, (__m256i)weights);
#else
  return sum + ((activations << 16) >> 16) * ((weights << 16) >> 16) + (activations >> 16) * (weights >> 16);
#endif
}

// A matrix of 8 bits. A panel is [k / 4][kWidth][4] bytes. A unit is four steps of k.
struct EightBitQuads {
  using Stored = int8_t;
  static constexpr bool kHasOffsets = false, kRounds = true;
  static constexpr int64_t kUnit = kQuad, kUnitBytes = kWidth * kQuad;
  static constexpr int32_t kMoved = 0;  // the number that is added to all weights
#if defined(WITH_VNNI)
  static constexpr int64_t kWords = 1;  // words of x per unit: four unsigned bytes, increased by 128

  static void Arrange(const int8_t* levels, int64_t size, int32_t* words) {
    auto* bytes = reinterpret_cast<uint8_t*>(words);
    for (int64_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(levels[i] + 128);
  }

  template <int R>
  static void Accumulate(const int32_t* x, int64_t stride, const int8_t* panel, int64_t units, const int8_t* ahead,
                         Integers (&sum)[R][kVectors]) {
    Integers moved[kVectors] = {};  // the excess of the sums: 128 times the sums of the weights
    for (; units > 0; --units, panel += kUnitBytes, x += kWords) {
      for (int64_t line = 0; line < kUnitBytes; line += kLine, ahead += kLine) __builtin_prefetch(ahead);
      const auto* weights = reinterpret_cast<const Integers*>(panel);
      for (int v = 0; v < kVectors; ++v) {
        moved[v] = AddProducts(moved[v], Broadcast(0x80808080), weights[v]);
        for (int r = 0; r < R; ++r) sum[r][v] = AddProducts(sum[r][v], Broadcast(x[r * stride]), weights[v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) sum[r][v] -= moved[v];
  }
#else
  static constexpr int64_t kWords = 2;  // words of x per unit: (first, third) and (second, fourth), 16 bits each

  static void Arrange(const int8_t* levels, int64_t size, int32_t* words) {
    auto* halves = reinterpret_cast<int16_t*>(words);
    int64_t i = 0;
#if defined(WITH_AVX2)
    for (; i + 16 <= size; i += 16) {
      const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(levels + i)));
      _mm256_storeu_si256((__m256i*)(halves + i), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(wide, 0xd8), 0xd8));
    }
#endif
    for (; i < size; ++i) halves[(i & ~int64_t{3}) + ((i & 1) << 1) + ((i >> 1) & 1)] = levels[i];
  }

  template <int R>
  static void Accumulate(const int32_t* x, int64_t stride, const int8_t* panel, int64_t units, const int8_t* ahead,
                         Integers (&sum)[R][kVectors]) {
    for (; units > 0; --units, panel += kUnitBytes, x += kWords) {
      for (int64_t line = 0; line < kUnitBytes; line += kLine, ahead += kLine) __builtin_prefetch(ahead);
      Integers evens[kVectors], odds[kVectors];  // bytes 0 and 2, 1 and 3 of each word, in 16 bits each
      for (int v = 0; v < kVectors; ++v) {
        const Halves weights = *reinterpret_cast<const Halves*>(panel + v * kLanes * kQuad);
        evens[v] = (Integers)((weights << 8) >> 8), odds[v] = (Integers)(weights >> 8);
      }
      for (int r = 0; r < R; ++r) {
        const Integers first = Broadcast(x[r * stride]), second = Broadcast(x[r * stride + 1]);
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] = AddPairs(sum[r][v], first, evens[v]);
          sum[r][v] = AddPairs(sum[r][v], second, odds[v]);
        }
      }
    }
  }
#endif
};

// A matrix of 4 bits, in the panels of FourBits. A unit is eight steps of k. The first word of x has its first, third,
// fifth and seventh byte, and the second word has the other bytes.
struct FourBitBlocks {
  using Stored = uint8_t;
  static constexpr bool kHasOffsets = false, kRounds = true;
  static constexpr int64_t kUnit = kBlock, kUnitBytes = kWidth * 4, kWords = 2;
#if defined(WITH_AVX512) || defined(WITH_AVX2)
  static constexpr int32_t kMoved = 8;  // makes all weights unsigned
#else
  static constexpr int32_t kMoved = 0;
#endif

  static void Arrange(const int8_t* levels, int64_t size, int32_t* words) {
    auto* bytes = reinterpret_cast<int8_t*>(words);
    int64_t i = 0;
#if defined(WITH_AVX2)
    const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15,  //
                                           0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    for (; i + 32 <= size; i += 32)
      _mm256_storeu_si256((__m256i*)(bytes + i),
                          _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i*)(levels + i)), order));
#endif
    for (; i < size; ++i) bytes[(i & ~int64_t{7}) + ((i & 1) << 2) + ((i & 7) >> 1)] = levels[i];
  }

  template <int R>
  static void Accumulate(const int32_t* x, int64_t stride, const int8_t* panel, int64_t units, const int8_t* ahead,
                         Integers (&sum)[R][kVectors]) {
#if defined(WITH_AVX512) || defined(WITH_AVX2)
    while (units > 0) {
#if defined(WITH_VNNI)
      const int64_t count = units;
      Integers (&parts)[R][kVectors] = sum;
#else
      const int64_t count = std::min<int64_t>(units, 4);  // 8 * 2 * 15 * 127 stays in 16 bits
      Halves parts[R][kVectors] = {};
#endif
      units -= count;
      for (const int32_t* end = x + count * kWords; x < end; x += kWords, panel += kUnitBytes) {
        for (int64_t line = 0; line < kUnitBytes; line += kLine, ahead += kLine) __builtin_prefetch(ahead);
        Integers evens[kVectors], odds[kVectors];
        for (int v = 0; v < kVectors; ++v) {
          const Integers words = *reinterpret_cast<const Integers*>(panel + v * kLanes * 4) ^ int32_t(0x88888888);
          evens[v] = words & 0x0f0f0f0f, odds[v] = (words >> 4) & 0x0f0f0f0f;
        }
        for (int r = 0; r < R; ++r) {
          const Integers first = Broadcast(x[r * stride]), second = Broadcast(x[r * stride + 1]);
          for (int v = 0; v < kVectors; ++v) {
#if defined(WITH_VNNI)
            parts[r][v] = AddProducts(AddProducts(parts[r][v], evens[v], first), odds[v], second);
#else
            parts[r][v] = AddProductsOfBytes(parts[r][v], evens[v], first);
            parts[r][v] = AddProductsOfBytes(parts[r][v], odds[v], second);
#endif
          }
        }
      }
#if !defined(WITH_VNNI)
      const Integers ones = Broadcast(0x00010001);
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v) sum[r][v] = AddPairs(sum[r][v], ones, (Integers)parts[r][v]);
#endif
    }
#else
    for (; units > 0; --units, panel += kUnitBytes, x += kWords)
      for (int v = 0; v < kVectors; ++v) {
        const Integers words = *reinterpret_cast<const Integers*>(panel + v * kLanes * 4);
        for (int i = 0; i < kBlock; ++i)
          for (int r = 0; r < R; ++r)
            sum[r][v] += ((words << (28 - 4 * i)) >> 28) *
                         reinterpret_cast<const int8_t*>(x + r * stride)[(i & 1) * 4 + i / 2];
      }
#endif
  }
};

// Rounds numbers of x to 8-bit integers times a scale. Returns the scale; NaN if a number is not finite.
inline float RoundGroup(const float* x, int64_t size, int8_t* levels) {
  constexpr int32_t kInfinity = 0x7f800000;
  int32_t largest = 0;  // bits of the largest magnitude; bits of magnitudes sort like the magnitudes
  for (int64_t i = 0; i < size; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffff);
  }
  if (largest >= kInfinity) {
    std::fill_n(levels, size, int8_t{0});
    return std::nanf("");
  }
  float scale;
  std::memcpy(&scale, &largest, sizeof scale);
  scale = std::max(scale / 127.0f, 1.17549435e-38f);
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a float this large has an integer in its lowest bits
  for (int64_t i = 0; i < size; ++i) {
    const float moved = std::min(std::max(x[i] / scale, -127.0f), 127.0f) + kRound;
    int32_t bits;
    std::memcpy(&bits, &moved, sizeof bits);
    levels[i] = static_cast<int8_t>(bits);
  }
  return scale;
}

// Rounded rows of x, in the layout that a format needs.
struct RoundedRows {
  int64_t words, groups;           // numbers of words and groups of a row
  std::vector<int32_t> values;     // [rows][words]
  std::vector<float> scales;       // [rows][groups]
  std::vector<int32_t> sums;       // [rows][groups], sums of the integers

  template <class Format>
  static RoundedRows Of(const float* x, int64_t rows, int64_t size, int64_t groups) {
    const int64_t padded = (size + Format::kUnit - 1) / Format::kUnit * Format::kUnit, depth = size / groups;
    RoundedRows rounded{padded / Format::kUnit * Format::kWords, groups};
    rounded.values.resize(rows * rounded.words);
    rounded.scales.resize(rows * groups);
    rounded.sums.resize(rows * groups);
#pragma omp parallel if (rows > 1)
    {
      std::vector<int8_t> levels(padded);
#pragma omp for schedule(static)
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t group = 0; group < groups; ++group) {
          int8_t* of_group = levels.data() + group * depth;
          rounded.scales[row * groups + group] = RoundGroup(x + row * size + group * depth, depth, of_group);
          int32_t sum = 0;
          for (int64_t i = 0; i < depth; ++i) sum += of_group[i];
          rounded.sums[row * groups + group] = sum;
        }
        Format::Arrange(levels.data(), padded, rounded.values.data() + row * rounded.words);
      }
    }
    return rounded;
  }
};

// Adds the products of one group, which has `units` units, to the sums of a panel's columns. This is done for R rows,
// starting at `row`. The same number of bytes is prefetched, starting at `ahead`.
template <class Format, int R>
void AddRoundedGroup(const RoundedRows& x, int64_t row, int64_t group, const int8_t* values, int64_t units,
                     const int8_t* ahead, const Panel& panel, Vector (*sums)[kVectors]) {
  Integers parts[R][kVectors] = {};
  Format::template Accumulate<R>(x.values.data() + row * x.words + group * units * Format::kWords, x.words, values,
                                 units, ahead, parts);
  Vector scales[kVectors], offsets[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (Format::kHasOffsets) {
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel.scales) + group * 2 * kWidth + v * kLanes;
      scales[v] = Widen(halves), offsets[v] = Widen(halves + kWidth);
    } else {
      scales[v] = reinterpret_cast<const Vector*>(panel.scales + group * kWidth)[v];
    }
  }
  for (int r = 0; r < R; ++r) {
    const float step = x.scales[(row + r) * x.groups + group];
    const int32_t sum = x.sums[(row + r) * x.groups + group];
    for (int v = 0; v < kVectors; ++v) {
      const Vector exact = __builtin_convertvector(parts[r][v] - Format::kMoved * sum, Vector);
      sums[r][v] += exact * (step * scales[v]);
      if constexpr (Format::kHasOffsets) sums[r][v] += step * static_cast<float>(sum) * offsets[v];
    }
  }
}

// Calls AddRoundedGroup for up to kRows rows. (WithRows is not used, because the captures of a lambda would leave too
// few registers here.)
template <class Format, int R = kRows>
void AddRoundedGroupUpTo(const RoundedRows& x, int64_t row, int64_t rows, int64_t group, const int8_t* values,
                         int64_t units, const int8_t* ahead, const Panel& panel, Vector (*sums)[kVectors]) {
  if constexpr (R > 1) {
    if (rows < R)
      return AddRoundedGroupUpTo<Format, R - 1>(x, row, rows, group, values, units, ahead, panel, sums);
  }
  AddRoundedGroup<Format, R>(x, row, group, values, units, ahead, panel, sums);
}

// Computes the panel's columns of y for up to kMostRows rows of x, starting at `first`. A group has `units` units.
template <class Format>
void MultiplyRoundedPanel(const RoundedRows& x, int64_t first, int64_t rows, int64_t units, const Panel& panel,
                          float* y, int64_t stride) {
  Vector sums[kMostRows][kVectors];
  float start[kWidth] = {};
  if (panel.bias != nullptr) std::copy_n(panel.bias, panel.columns, start);
  for (int64_t row = 0; row < rows; ++row) std::memcpy(sums[row], start, sizeof start);
  // A single tile of rows prefetches the bytes at the distance kAhead. Several tiles each prefetch a part of the next
  // group.
  constexpr int64_t kAhead = 4096;
  const int64_t tiles = (rows + kRows - 1) / kRows, bytes = units * Format::kUnitBytes;
  const int8_t* values = panel.values;
  for (int64_t group = 0; group < panel.groups; ++group, values += bytes)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = tile * kRows;
      const int8_t* ahead = values + (tiles == 1 ? kAhead : bytes + tile * (bytes / tiles / kLine * kLine));
      AddRoundedGroupUpTo<Format>(x, first + row, rows - row, group, values, units, ahead, panel, sums + row);
    }
  for (int64_t row = 0; row < rows; ++row) std::memcpy(y + row * stride, sums[row], panel.columns * sizeof(float));
}

// ---- products on all threads -------------------------------------------------------------------------------------

// A matrix [size][columns] in panels, whose size in bytes depends on the format.
struct Matrix {
  const int8_t* values;
  const float* scales;  // [panels][groups][kWidth]; with offsets, [panels][groups][2][kWidth] in float16
  const float* bias;    // or null
  int64_t size, columns, groups;
  bool has_offsets = false;
  // Sets the scales to `data`, [panels][count][kWidth].
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

// Returns the sums [rows][groups] of x[rows][groups][depth]. `depth` must be a multiple of kBlock.
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

// Computes y[rows][columns] = x[rows][size] matrix + bias.
template <class Format>
void Product(const float* x, int64_t rows, const Matrix& matrix, float* y) {
  const int64_t size = matrix.size, padded = (size + kBlock - 1) / kBlock * kBlock;
  std::vector<float> copy;
  if (padded != size) {  // reads beyond the end of a row must not give NaN
    copy.resize(rows * padded);
    for (int64_t row = 0; row < rows; ++row) std::copy_n(x + row * size, size, copy.data() + row * padded);
    x = copy.data();
  }
  std::vector<float> x_sums;
  if (Format::kHasOffsets) x_sums = SumsOfGroups(x, rows, matrix.groups, padded / matrix.groups);
  const int64_t num_panels = matrix.Panels(), bytes = padded / kBlock * Format::kUnitBytes;
  constexpr int kTogether = Format::kSideBySide;
#ifdef _OPENMP
  const int64_t threads = omp_get_max_threads();
#else
  const int64_t threads = 1;
#endif
  int64_t num_sets = 0;  // sets of panels, the same number for each thread; other panels are multiplied one by one
  if (rows == 1 && padded / matrix.groups >= Format::kShortest)
    num_sets = num_panels / (kTogether * threads) * threads;
#pragma omp parallel for schedule(static)
  for (int64_t set = 0; set < num_sets; ++set) {
    Panel panels[kTogether];
    for (int p = 0; p < kTogether; ++p) {
      panels[p] = matrix.At(set * kTogether + p, bytes);
      panels[p].x_sums = x_sums.data();
    }
    MultiplyPanelsByOne<Format, kTogether>(x, padded, panels, y + set * kTogether * kWidth);
  }
#pragma omp parallel for schedule(static)
  for (int64_t p = num_sets * kTogether; p < num_panels; ++p) {
    Panel panel = matrix.At(p, bytes);
    for (int64_t row = 0; row < rows; row += kMostRows) {
      panel.x_sums = x_sums.data() + row * matrix.groups;
      MultiplyPanel<Format>(x + row * padded, std::min(kMostRows, rows - row), padded, panel,
                            y + row * matrix.columns + p * kWidth, matrix.columns);
    }
  }
}

// Computes y[rows][columns] = x[rows][size] matrix + bias, after rounding each row of x to 8 bits, with one scale per
// group.
template <class Format>
void RoundedProduct(const float* x, int64_t rows, const Matrix& matrix, float* y) {
  const RoundedRows rounded = RoundedRows::Of<Format>(x, rows, matrix.size, matrix.groups);
  const int64_t units = rounded.words / Format::kWords;
  constexpr int64_t kRowsInCache = 2 * kMostRows;  // rows that stay in the L2 cache while all panels are read
#pragma omp parallel
  for (int64_t first = 0; first < rows; first += kRowsInCache) {
    const int64_t end = std::min(rows, first + kRowsInCache);
#pragma omp for schedule(static) nowait
    for (int64_t p = 0; p < matrix.Panels(); ++p) {
      const Panel panel = matrix.At(p, units * Format::kUnitBytes);
      for (int64_t row = first; row < end; row += kMostRows)
        MultiplyRoundedPanel<Format>(rounded, row, std::min(kMostRows, end - row), units / matrix.groups, panel,
                                     y + row * matrix.columns + p * kWidth, matrix.columns);
    }
  }
}

// Computes the product in the given format, with offsets if the matrix has them.
template <class Format>
void ProductOf(const float* x, int64_t rows, const Matrix& matrix, float* y) {
  if constexpr (!Format::kHasOffsets) {
    if (matrix.has_offsets) return ProductOf<WithOffsets<Format>>(x, rows, matrix, y);
  }
  if constexpr (Format::kRounds) RoundedProduct<Format>(x, rows, matrix, y);
  else Product<Format>(x, rows, matrix, y);
}

}  // namespace few_bits
