// Products with random matrices, and functions of many numbers, against float64; meant to be run under sanitizers.
//
// Every array lies in memory of its own of exactly its size, so that reading or writing beyond it is found.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "few_bits.h"
#include "few_rows.h"
#include "vector_math.h"

namespace {

constexpr double kTolerance = 2e-6, kSmallest = 1.17549435e-38;
std::mt19937_64 random_bits(7);

int64_t Between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_bits); }
double Normal() { return std::normal_distribution<double>()(random_bits); }

template <class T>
struct Exact {  // memory of exactly this size
  explicit Exact(int64_t size) : size(size), data(static_cast<T*>(std::malloc(size * sizeof(T)))) {}
  ~Exact() { std::free(data); }
  Exact(const Exact&) = delete;
  T& operator[](int64_t i) { return data[i]; }
  int64_t size;
  T* data;
};

void Check(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "wrong: %s\n", what);
    std::exit(1);
  }
}

struct Case {
  int64_t rows, size, columns, groups, largest;
  Exact<float> x, bias;
  std::vector<int> levels;   // [size][columns]
  std::vector<float> scales;  // [groups][columns]

  Case(int bits, bool grouped)
      : rows(Between(0, 2) == 0 ? 1 : Between(1, 40)), size(Between(1, 150)), columns(Between(1, 260)), groups(1),
        largest((1 << (bits - 1)) - 1), x((size = grouped ? Grouped(size) : size, rows * size)), bias(columns) {
    levels.resize(size * columns);
    for (int& level : levels) level = Between(-largest, largest);
    scales.resize(groups * columns);
    const int64_t kind = Between(0, 7);
    for (float& scale : scales) scale = kind == 0 ? 1e12f : kind == 2 ? float(kSmallest) : std::exp(Normal() * 3 - 4);
    for (int64_t i = 0; i < rows * size; ++i)
      x[i] = Normal() * (kind == 0 ? 1e15 : kind == 1 ? 1e-41 : 1) * (kind == 2 || Between(0, 5) == 0 ? 0 : 1);
    if (kind == 3)
      for (int64_t row = 0; row < rows; ++row) x[row * size] = 3e4f;
    for (int64_t i = 0; i < columns; ++i) bias[i] = Normal();
  }
  int64_t Grouped(int64_t wanted) {
    const int64_t group = Between(0, 2) == 0 ? 64 * Between(1, 2) : 8 * Between(1, 6);
    groups = std::max<int64_t>(1, wanted / group);
    return groups * group;
  }
  double Weight(int64_t k, int64_t n) const {
    return static_cast<double>(levels[k * columns + n]) * scales[k / (size / groups) * columns + n];
  }
  // `weight(k, n)` times x (or `levels_of(row, k)` steps), compared with y.
  template <class X, class Room>
  void Compare(const Exact<float>& y, const X& value, const Room& room, const char* what) const {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t n = 0; n < columns; ++n) {
        double sum = bias.data[n], magnitude = std::fabs(sum), least = 0;
        for (int64_t k = 0; k < size; ++k) {
          const double product = value(row, k) * Weight(k, n);
          sum += product, magnitude += std::fabs(product), least += std::fabs(Weight(k, n)) + 1;
        }
        const double got = y.data[row * columns + n];
        Check(std::fabs(got - sum) <= kTolerance * magnitude + kSmallest * least + room(row, n), what);
      }
  }
};

constexpr int64_t kWidth = few_bits::kWidth;

// The product with x rounded to 8 bits in each group of a row.
template <class Format>
void CheckRounded(const Case& c, const few_bits::Matrix& matrix, Exact<float>& y, const char* what) {
  few_bits::RoundedProduct<Format>(c.x.data, c.rows, matrix, y.data);
  std::vector<double> rounded(c.rows * c.size), near(c.rows * c.size);
  const int64_t depth = c.size / c.groups;
  for (int64_t first = 0; first < c.rows * c.size; first += depth) {
    float largest = 0;
    for (int64_t k = first; k < first + depth; ++k) largest = std::max(largest, std::fabs(c.x.data[k]));
    const float step = std::max(largest / 127.0f, float(kSmallest));
    for (int64_t k = first; k < first + depth; ++k) {
      const double level = c.x.data[k] / step;
      rounded[k] = std::nearbyint(std::min(std::max(level, -127.0), 127.0)) * step;
      near[k] = std::fabs(std::fabs(level - std::floor(level)) - 0.5) < 1e-4 ? step : 0;
    }
  }
  c.Compare(
      y, [&](int64_t row, int64_t k) { return rounded[row * c.size + k]; },
      [&](int64_t row, int64_t n) {  // an activation between two integers may go to either
        double room = kSmallest * c.size * 127 * 127;
        for (int64_t k = 0; k < c.size; ++k) room += near[row * c.size + k] * std::fabs(c.Weight(k, n));
        return room;
      },
      what);
}

// Panels [p][words][kWidth][per_word] bytes of levels; `byte(level)` of each, in the order that `place` says.
void CheckBytes(bool integers) {
  const Case c(8, Between(0, 1));
  const int64_t depth = integers ? few_bits::kQuad : few_bits::kBlock, padded = (c.size + depth - 1) / depth * depth;
  const int64_t panels = (c.columns + kWidth - 1) / kWidth;
  Exact<int8_t> values(panels * padded * kWidth);
  Exact<float> scales(panels * c.groups * kWidth), y(c.rows * c.columns);
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t k = 0; k < padded; ++k)
      for (int64_t i = 0; i < kWidth; ++i) {
        const int64_t n = p * kWidth + i;
        const int8_t level = k < c.size && n < c.columns ? c.levels[k * c.columns + n] : 0;
        const int64_t place = integers ? (k / 4 * kWidth + i) * 4 + k % 4 : k * kWidth + i;
        values[p * padded * kWidth + place] = level;
      }
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t g = 0; g < c.groups; ++g)
      for (int64_t i = 0; i < kWidth; ++i)
        scales[(p * c.groups + g) * kWidth + i] =
            p * kWidth + i < c.columns ? c.scales[g * c.columns + p * kWidth + i] : 0;
  const few_bits::Matrix matrix{values.data, scales.data, c.bias.data, c.size, c.columns, c.groups};
  if (!integers) {
    few_bits::Product<few_bits::EightBits>(c.x.data, c.rows, matrix, y.data);
    c.Compare(y, [&](int64_t row, int64_t k) { return double(c.x.data[row * c.size + k]); },
              [](int64_t, int64_t) { return 0.0; }, "8 bits");
    return;
  }
  CheckRounded<few_bits::EightBitQuads>(c, matrix, y, "8 bits and 8 bits");
}

void CheckFourBits() {
  const Case c(4, true);
  const int64_t panels = (c.columns + kWidth - 1) / kWidth, words = c.size / 8;
  Exact<int8_t> values(panels * words * kWidth * 4);
  Exact<float> scales(panels * c.groups * kWidth), y(c.rows * c.columns);
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t w = 0; w < words; ++w)
      for (int64_t i = 0; i < kWidth; ++i) {
        const int64_t n = p * kWidth + i;
        uint32_t word = 0;
        for (int64_t j = 0; j < 8; ++j)
          if (n < c.columns) word |= uint32_t(c.levels[(w * 8 + j) * c.columns + n] & 15) << (4 * j);
        std::memcpy(values.data + ((p * words + w) * kWidth + i) * 4, &word, 4);
      }
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t g = 0; g < c.groups; ++g)
      for (int64_t i = 0; i < kWidth; ++i)
        scales[(p * c.groups + g) * kWidth + i] =
            p * kWidth + i < c.columns ? c.scales[g * c.columns + p * kWidth + i] : 0;
  const few_bits::Matrix matrix{values.data, scales.data, c.bias.data, c.size, c.columns, c.groups};
  few_bits::Product<few_bits::FourBits>(c.x.data, c.rows, matrix, y.data);
  c.Compare(y, [&](int64_t row, int64_t k) { return double(c.x.data[row * c.size + k]); },
            [](int64_t, int64_t) { return 0.0; }, "4 bits");
  CheckRounded<few_bits::FourBitBlocks>(c, matrix, y, "4 bits and 8 bits");
}

void CheckFloats() {
  const Case c(8, false);
  const int64_t panels = (c.columns + kWidth - 1) / kWidth;
  Exact<float> cut(panels * c.size * kWidth), whole(c.size * c.columns), y(c.rows * c.columns);
  for (int64_t k = 0; k < c.size; ++k)
    for (int64_t n = 0; n < panels * kWidth; ++n) {
      const float weight = n < c.columns ? c.Weight(k, n) : 0;
      cut[(n / kWidth * c.size + k) * kWidth + n % kWidth] = weight;
      if (n < c.columns) whole[k * c.columns + n] = weight;
    }
  const auto x = [&](int64_t row, int64_t k) { return double(c.x.data[row * c.size + k]); };
  const auto none = [](int64_t, int64_t) { return 0.0; };
  few_rows::Product(c.x.data, c.rows, c.size, cut.data, c.bias.data, c.columns, y.data);
  c.Compare(y, x, none, "float32 panels");
  few_rows::WholeProduct(c.x.data, c.rows, c.size, whole.data, c.bias.data, c.columns, y.data);
  c.Compare(y, x, none, "float32");
  const int64_t counts[] = {0, c.rows};
  Exact<float> both(2 * c.size * c.columns);
  std::copy_n(whole.data, c.size * c.columns, both.data + c.size * c.columns);
  few_rows::GroupedProduct(c.x.data, counts, 2, c.size, both.data, c.columns, y.data);
  for (int64_t i = 0; i < c.rows * c.columns; ++i) y[i] += c.bias.data[i % c.columns];
  c.Compare(y, x, none, "float32 in groups");
}

void CheckFunctions() {
  const int64_t size = Between(1, 70);
  Exact<float> x(size), y(size), weight(size), bias(size);
  for (int64_t i = 0; i < size; ++i) x[i] = Normal() * 4, weight[i] = Normal(), bias[i] = Normal();
  const auto all = [&](auto of, auto exact, const char* what) {
    vector_math::Map(x.data, size, y.data, of);
    for (int64_t i = 0; i < size; ++i)
      Check(std::fabs(y[i] - exact(double(x[i]))) < 1e-6 * (1 + std::fabs(x[i])), what);
  };
  all(vector_math::Gelu, [](double v) { return v * std::erfc(-v / std::sqrt(2.0)) / 2; }, "gelu");
  all(vector_math::GeluTanh,
      [](double v) { return v / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v))); }, "tanh gelu");
  all(vector_math::Silu, [](double v) { return v / (1 + std::exp(-v)); }, "silu");
  all(vector_math::QuickGelu, [](double v) { return v / (1 + std::exp(-1.702 * v)); }, "quick gelu");
  all(vector_math::Relu, [](double v) { return std::max(v, 0.0); }, "relu");
  double mean = 0, square = 0, exact = 0, variance = 0;
  for (int64_t i = 0; i < size; ++i) mean += x[i] / size, square += double(x[i]) * x[i] / size;
  for (int64_t i = 0; i < size; ++i) variance += (x[i] - mean) * (x[i] - mean) / size;
  vector_math::Normalize(x.data, size, weight.data, bias.data, 1e-5f, y.data);
  for (int64_t i = 0; i < size; ++i) {
    exact = (x[i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i];
    Check(std::fabs(y[i] - exact) < 1e-4, "layer norm");
  }
  vector_math::Normalize(x.data, size, weight.data, nullptr, 1e-5f, y.data);
  for (int64_t i = 0; i < size; ++i)
    Check(std::fabs(y[i] - x[i] / std::sqrt(square + 1e-5) * weight[i]) < 1e-4, "rms norm");
  exact = 0;
  for (int64_t i = 0; i < size; ++i) exact += double(x[i]) * weight[i];
  Check(std::fabs(vector_math::Dot(x.data, weight.data, size) - exact) < 1e-3, "dot");
  const int64_t count = Between(0, 5), width = Between(1, 150);
  Exact<float> factors(count), rows(count * width), sums(width);
  for (int64_t k = 0; k < count; ++k) factors[k] = Normal();
  for (int64_t i = 0; i < count * width; ++i) rows[i] = Normal();
  std::fill_n(sums.data, width, 0.5f);
  vector_math::AddRows(factors.data, count, rows.data, width, sums.data);
  for (int64_t i = 0; i < width; ++i) {
    exact = 0.5;
    for (int64_t k = 0; k < count; ++k) exact += double(factors[k]) * rows[k * width + i];
    Check(std::fabs(sums[i] - exact) < 1e-4, "sum of rows");
  }
  double total = 0;
  for (int64_t i = 0; i < size; ++i) y[i] = x[i], total += std::exp(double(x[i]));
  vector_math::Softmax(y.data, size);
  for (int64_t i = 0; i < size; ++i) Check(std::fabs(y[i] - std::exp(double(x[i])) / total) < 1e-6, "softmax");
}

}  // namespace

int main(int, char** arguments) {
  const int cases = std::atoi(arguments[1]);
  for (int i = 0; i < cases; ++i) {
    CheckBytes(false);
    CheckBytes(true);
    CheckFourBits();
    CheckFloats();
    CheckFunctions();
  }
  std::printf("%d cases: all within %g\n", cases, kTolerance);
}
