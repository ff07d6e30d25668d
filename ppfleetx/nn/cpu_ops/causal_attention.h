// Causal attention of one head in bfloat16. The whole matrix of scores is never stored.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vector_math.h"
#include "onednn.h"

namespace causal_attention {

using vector_math::Vector;

struct Sizes {
  int64_t positions, width, value_width;  // width: number of features of a query or key
  float scale;                            // factor of the scores
  const int32_t* start;                   // the first position that each position attends to, or null
  int64_t Start(int64_t row) const { return start == nullptr ? 0 : std::clamp<int64_t>(start[row], 0, row); }
};

using Bits = std::vector<uint16_t>;
using Floats = std::vector<float>;

// Returns the number of positions of a block. Blocks are long enough for efficient products. They are short enough to
// skip most masked scores, and to need little memory in comparison with the whole matrix of scores.
inline int64_t BlockOf(int64_t positions) { return std::clamp<int64_t>((positions + 511) / 512 * 64, 64, 512); }

// Computes out = x y for x [m, k] and y [k, n]. With turn_x (turn_y), x (y) is stored transposed.
inline void Multiply(int64_t m, int64_t k, int64_t n, const uint16_t* x, bool turn_x, const uint16_t* y, bool turn_y,
                     float* out) {
  onednn::Multiply({1, m, k, n, turn_x, turn_y, false}, x, y, nullptr, out);
}

inline void Add(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

struct Head {
  Bits query, key, value;
  Head(const Sizes& sizes, const float* q, const float* k, const float* v) {
    const auto low = [&](const float* from, int64_t width, Bits& to) {
      to.resize(sizes.positions * width);
      onednn::Round(from, to.size(), to.data());
    };
    low(q, sizes.width, query);
    low(k, sizes.width, key);
    low(v, sizes.value_width, value);
  }
};

// Computes the output [positions, value width], and the logarithms [positions] of the sums of exponentials.
inline void Forward(const Sizes& sizes, const float* q, const float* k, const float* v, float* out, float* logarithms) {
  const Head head(sizes, q, k, v);
  const int64_t block = BlockOf(sizes.positions);
  Floats scores(block * sizes.positions);
  Bits weights(scores.size());
  for (int64_t begin = 0; begin < sizes.positions; begin += block) {
    const int64_t end = std::min(begin + block, sizes.positions), rows = end - begin;
    Multiply(rows, sizes.width, end, &head.query[begin * sizes.width], false, head.key.data(), true, scores.data());
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t first = sizes.Start(begin + i), count = begin + i + 1 - first;
      float* row = &scores[i * end];
      logarithms[begin + i] = vector_math::Softmax(row + first, count, sizes.scale);
      std::fill_n(row, first, 0.0f);
      std::fill(row + first + count, row + end, 0.0f);
    }
    onednn::Round(scores.data(), rows * end, weights.data());
    Multiply(rows, end, sizes.value_width, weights.data(), false, head.value.data(), false,
             out + begin * sizes.value_width);
  }
}

// Adds the gradients of a head to the gradients of queries, keys and values.
inline void Backward(const Sizes& sizes, const float* q, const float* k, const float* v, const float* out,
                     const float* logarithms, const float* upstream, float* of_q, float* of_k, float* of_v) {
  const Head head(sizes, q, k, v);
  const int64_t positions = sizes.positions, width = sizes.width, value_width = sizes.value_width;
  const int64_t block = BlockOf(positions);
  Bits low(positions * value_width);
  onednn::Round(upstream, low.size(), low.data());
  Floats rounded(value_width), mean(positions);  // mean: weighted mean of each query's gradients of weights
  for (int64_t i = 0; i < positions; ++i) {
    for (int64_t j = 0; j < value_width; ++j) rounded[j] = onednn::FloatOf(low[i * value_width + j]);
    mean[i] = vector_math::Dot(out + i * value_width, rounded.data(), value_width);
  }
  Floats scores(positions * block), gradients(scores.size()), product(positions * std::max(width, value_width));
  Bits weights(scores.size()), of_scores(scores.size());
  for (int64_t begin = 0; begin < positions; begin += block) {
    // The keys of this block, and all queries from the beginning of the block.
    const int64_t keys = std::min(block, positions - begin), rows = positions - begin;
    const uint16_t *query = &head.query[begin * width], *key = &head.key[begin * width];
    const uint16_t* of_out = &low[begin * value_width];
    Multiply(rows, width, keys, query, false, key, true, scores.data());
    Multiply(rows, value_width, keys, of_out, false, &head.value[begin * value_width], true, gradients.data());
    for (int64_t i = 0; i < rows; ++i) {
      float *row = &scores[i * keys], *gradient = &gradients[i * keys];
      const float logarithm = logarithms[begin + i], average = mean[begin + i];
      const int64_t first = std::clamp<int64_t>(sizes.Start(begin + i) - begin, 0, keys);
      const int64_t last = std::min(i + 1, keys);
      vector_math::Map(row, keys, row, [&](Vector x) { return vector_math::Exp(x * sizes.scale - logarithm); });
      std::fill_n(row, first, 0.0f);
      std::fill(row + last, row + keys, 0.0f);
      for (int64_t j = 0; j < keys; ++j) gradient[j] = row[j] * (gradient[j] - average) * sizes.scale;
    }
    onednn::Round(scores.data(), rows * keys, weights.data());
    onednn::Round(gradients.data(), rows * keys, of_scores.data());
    Multiply(keys, rows, value_width, weights.data(), true, of_out, false, product.data());
    Add(product.data(), keys * value_width, of_v + begin * value_width);
    Multiply(keys, rows, width, of_scores.data(), true, query, false, product.data());
    Add(product.data(), keys * width, of_k + begin * width);
    Multiply(rows, keys, width, of_scores.data(), false, key, false, product.data());
    Add(product.data(), rows * width, of_q + begin * width);
  }
}

}  // namespace causal_attention
