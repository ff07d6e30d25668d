// Vectorized functions: dot products, exponentials, norms, activations.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "few_rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vector_math {

using few_rows::kLanes;
using few_rows::Vector;
using Integers = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(sizeof(int32_t)), may_alias));

inline Vector Load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void Store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }

inline Vector LoadFirst(const float* from, int64_t count, float rest) {
  float values[kLanes];
  std::fill_n(values, kLanes, rest);
  std::copy_n(from, count, values);
  return Load(values);
}

inline void StoreFirst(float* to, int64_t count, Vector value) {
  float values[kLanes];
  Store(values, value);
  std::copy_n(values, count, to);
}

inline float Sum(Vector value) {
#if PANEL_WIDTH == 48 && defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#elif PANEL_WIDTH == 16 && defined(__AVX__)
  const __m128 fours = _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
  const __m128 twos = _mm_add_ps(fours, _mm_movehl_ps(fours, fours));
  return _mm_cvtss_f32(_mm_add_ss(twos, _mm_movehdup_ps(twos)));
#else
  float values[kLanes];
  Store(values, value);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) values[i] += values[i + width];
  return values[0];
#endif
}

// Computes to[i] = of(from[i]) for all i.
template <class Of>
void Map(const float* from, int64_t size, float* to, const Of& of) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) Store(to + i, of(Load(from + i)));
  if (i < size) StoreFirst(to + i, size - i, of(LoadFirst(from + i, size - i, 0.0f)));
}

inline float Dot(const float* a, const float* b, int64_t size) {
  Vector sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    sums[0] += Load(a + i) * Load(b + i);
    sums[1] += Load(a + i + kLanes) * Load(b + i + kLanes);
  }
  for (; i + kLanes <= size; i += kLanes) sums[0] += Load(a + i) * Load(b + i);
  float rest = 0;
  for (; i < size; ++i) rest += a[i] * b[i];
  return Sum(sums[0] + sums[1]) + rest;
}

// Computes to[k] = a . rows[k], bitwise equal to Dot. With common head sizes, `a` stays in registers.
template <int V>
void Dots(const float* a, const float* rows, int64_t count, float* to) {
  Vector left[V];
  for (int v = 0; v < V; ++v) left[v] = Load(a + v * kLanes);
  for (int64_t k = 0; k < count; ++k, rows += V * kLanes) {
    Vector sums[2] = {};
    for (int v = 0; v < V; ++v) sums[v % 2] += left[v] * Load(rows + v * kLanes);
    to[k] = Sum(sums[0] + sums[1]);
  }
}

inline void Dots(const float* a, const float* rows, int64_t count, int64_t size, float* to) {
  switch (size) {
    case 4 * kLanes: return Dots<4>(a, rows, count, to);
    case 8 * kLanes: return Dots<8>(a, rows, count, to);
  }
  for (int64_t k = 0; k < count; ++k) to[k] = Dot(a, rows + k * size, size);
}

// Computes y[i] += sum of factors[k] * rows[k][i], in the order of k. V vectors of y at a time stay in registers.
// Begins at index i, and returns the first index for which too few numbers are left.
template <int V>
int64_t AddRows(const float* factors, int64_t count, const float* rows, int64_t size, int64_t i, float* y) {
  for (; i + V * kLanes <= size; i += V * kLanes) {
    Vector sums[V];
    for (int v = 0; v < V; ++v) sums[v] = Load(y + i + v * kLanes);
    for (int64_t k = 0; k < count; ++k)
      for (int v = 0; v < V; ++v) sums[v] += factors[k] * Load(rows + k * size + i + v * kLanes);
    for (int v = 0; v < V; ++v) Store(y + i + v * kLanes, sums[v]);
  }
  return i;
}

inline void AddRows(const float* factors, int64_t count, const float* rows, int64_t size, float* y) {
  int64_t i = AddRows<8>(factors, count, rows, size, 0, y);
  i = AddRows<4>(factors, count, rows, size, i, y);
  i = AddRows<1>(factors, count, rows, size, i, y);
  for (; i < size; ++i)
    for (int64_t k = 0; k < count; ++k) y[i] += factors[k] * rows[k * size + i];
}

inline Vector Max(Vector a, Vector b) { return a > b ? a : b; }
inline Vector Min(Vector a, Vector b) { return a < b ? a : b; }

// Returns e^x with a relative error of at most 2e-7. x is clipped: small results are (almost) 0, and the largest result
// is 1.7e38. NaN stays NaN.
inline Vector Exp(Vector x) {
  const Vector low = Vector{} - 87.0f, high = Vector{} + 88.0f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  const Vector moved = x * 1.44269504f + kRound;
  const Vector whole = moved - kRound;
  const Vector rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;  // ln 2 in two parts
  Vector sum = Vector{} + 1.0f / 5040;
  for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * rest + factor;
  const Integers exponent = ((Integers)moved - 0x4b400000 + 127) << 23;
  return sum * (Vector)exponent;
}

// Returns erfc(t) for t from 0 to 5.5, with an error of at most 2e-7: e^(-t p(t)), where the polynomial p was fitted to
// float64 values by least squares.
inline Vector ComplementOfErf(Vector t) {
  constexpr float kFitted[] = {-6.83882249e-8f, 1.94238214e-6f, -2.39786131e-5f, 1.68264116e-4f,
                               -7.23287812e-4f, 1.75044627e-3f, -1.91622763e-4f, -1.91582479e-2f,
                               1.02785133e-1f,  6.36617661e-1f, 1.12837923f};
  Vector sum = {};
  for (const float factor : kFitted) sum = sum * t + factor;
  return Exp(-t * sum);
}

inline Vector Gelu(Vector x) {
  const Vector zero = {}, last = zero + 5.5f;
  const Vector t = (x < zero ? -x : x) * 0.707106781f;
  const Vector tail = ComplementOfErf(t > last ? last : t);
  return 0.5f * x * (x < zero ? tail : 2.0f - tail);
}

inline Vector Silu(Vector x) { return x / (1.0f + Exp(-x)); }
inline Vector GeluTanh(Vector x) {  // (1 + tanh u) / 2 = 1 / (1 + e^(-2u))
  return x / (1.0f + Exp(-1.59576912f * (x + 0.044715f * x * x * x)));
}
inline Vector QuickGelu(Vector x) { return x / (1.0f + Exp(-1.702f * x)); }
inline Vector Relu(Vector x) {
  const Vector zero = {};
  return x < zero ? zero : x;
}

// Returns the sum of of(from[i]) for all i.
template <class Of>
float SumOf(const float* from, int64_t size, const Of& of) {
  Vector sum = {};
  float rest = 0;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sum += of(Load(from + i));
  for (; i < size; ++i) rest += of(from[i]);
  return rest + Sum(sum);
}

// The mean of a row (0 if not centered), and 1 / sqrt(variance + epsilon).
struct Moments {
  float mean, inverse;
  Moments(const float* row, int64_t size, bool centered, float epsilon)
      : mean(centered ? SumOf(row, size, [](auto x) { return x; }) / size : 0.0f) {
    const float squares = SumOf(row, size, [this](auto x) { return (x - mean) * (x - mean); });
    inverse = 1.0f / std::sqrt(squares / size + epsilon);
  }
};

// Computes to = (from - mean) / sqrt(variance + epsilon) * weight + bias. Without a bias, this is RMSNorm: mean = 0.
inline void Normalize(const float* from, int64_t size, const float* weight, const float* bias, float epsilon,
                      float* to) {
  const Moments of_row(from, size, bias != nullptr, epsilon);
  const float mean = of_row.mean, inverse = of_row.inverse;
  if (bias == nullptr)
    for (int64_t i = 0; i < size; ++i) to[i] = from[i] * inverse * weight[i];
  else
    for (int64_t i = 0; i < size; ++i) to[i] = (from[i] - mean) * inverse * weight[i] + bias[i];
}

inline float Largest(const float* values, int64_t size) {
  float parts[kLanes];
  Vector most = Vector{} + values[0];
  int64_t done = 0;
  for (; done + kLanes <= size; done += kLanes) most = Max(Load(values + done), most);
  Store(parts, most);
  float largest = parts[0];
  for (const float part : parts) largest = std::max(largest, part);
  for (; done < size; ++done) largest = std::max(largest, values[done]);
  return largest;
}

// Replaces the scores by the softmax of scores * scale. Returns the logarithm of the sum of the exponentials of
// scores * scale.
inline float Softmax(float* scores, int64_t size, float scale = 1.0f) {
  const float largest = Largest(scores, size);
  Map(scores, size, scores, [&](Vector x) { return Exp((x - largest) * scale); });
  const float total = SumOf(scores, size, [](auto x) { return x; }), inverse = 1.0f / total;
  for (int64_t i = 0; i < size; ++i) scores[i] *= inverse;
  return largest * scale + std::log(total);
}

}  // namespace vector_math
