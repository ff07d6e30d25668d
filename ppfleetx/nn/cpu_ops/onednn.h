// Products of bfloat16 matrices with float32 sums, computed by the oneDNN library in Paddle's wheel, and the conversion
// to bfloat16.

#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include <omp.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "paddle/phi/api/ext/op_meta_info.h"

// The wheel has no headers of the library. These are the declarations that are used here, from oneDNN 3's C interface.
extern "C" {
int dnnl_engine_create(void** engine, int kind, size_t index);
int dnnl_stream_create(void** stream, void* engine, unsigned flags);
int dnnl_memory_desc_create_with_strides(void** desc, int ndims, const int64_t* dims, int type, const int64_t* strides);
int dnnl_memory_create(void** memory, const void* desc, void* engine, void* handle);
int dnnl_memory_set_data_handle(void* memory, void* handle);
int dnnl_matmul_primitive_desc_create(void** desc, void* engine, const void* source, const void* weights,
                                      const void* bias, const void* destination, const void* attributes);
int dnnl_inner_product_forward_primitive_desc_create(void** desc, void* engine, int kind, const void* source,
                                                     const void* weights, const void* bias, const void* destination,
                                                     const void* attributes);
int dnnl_inner_product_backward_weights_primitive_desc_create(void** desc, void* engine, const void* source,
                                                              const void* weights_gradient, const void* bias_gradient,
                                                              const void* upstream, const void* forward,
                                                              const void* attributes);
int dnnl_primitive_create(void** primitive, const void* desc);
struct Argument {
  int index;
  void* memory;
};
int dnnl_memory_desc_destroy(void* desc);
int dnnl_memory_destroy(void* memory);
int dnnl_primitive_desc_destroy(void* desc);
int dnnl_primitive_destroy(void* primitive);
int dnnl_primitive_execute(const void* primitive, void* stream, int count, const Argument* arguments);
int dnnl_stream_wait(void* stream);
}

namespace onednn {

using Shape = std::vector<int64_t>;

constexpr int kCpu = 1, kDefaultFlags = 1, kBfloat16 = 2, kFloat32 = 3;  // dnnl_types.h
constexpr int kSource = 1, kDestination = 17, kWeights = 33, kBias = 41, kUpstream = 145, kWeightsGradient = 161;
constexpr int kForward = 64;

inline void Check(int status) { PD_CHECK(status == 0, "oneDNN refuses a product, status ", status); }

// ---- conversion: round to nearest, ties to even -----------------------------------------------------------------

inline uint16_t Rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline float FloatOf(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void Round(const float* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  for (; i + 32 <= count; i += 32) {
    const __m512bh pair = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
    _mm512_storeu_si512(to + i, (__m512i)pair);
  }
#endif
  for (; i < count; ++i) to[i] = Rounded(from[i]);
}

// ---- products ----------------------------------------------------------------------------------------------------

struct Product {
  void *primitive, *x, *y, *bias, *out;
};

inline void Destroy(const Product& product) {
  Check(dnnl_primitive_destroy(product.primitive));
  for (void* memory : {product.x, product.y, product.bias, product.out})
    if (memory != nullptr) Check(dnnl_memory_destroy(memory));
}

inline void* Engine() {
  static void* engine = [] {
    void* made = nullptr;
    Check(dnnl_engine_create(&made, kCpu, 0));
    return made;
  }();
  return engine;
}

// Describes a matrix [batch, rows, columns] that is stored row by row; if `turned`, its transpose is stored row by row.
// A matrix can have no batch, and a vector has only columns.
inline void* Describe(const Shape& dims, bool turned, int type) {
  const int64_t rows = dims.size() > 1 ? dims[dims.size() - 2] : 1, columns = dims.back();
  Shape strides = {rows * columns, turned ? 1 : columns, turned ? rows : 1};
  strides.erase(strides.begin(), strides.end() - dims.size());
  void* desc = nullptr;
  Check(dnnl_memory_desc_create_with_strides(&desc, dims.size(), dims.data(), type, strides.data()));
  return desc;
}

inline void* MemoryOf(const void* desc) {
  void* memory = nullptr;
  Check(dnnl_memory_create(&memory, desc, Engine(), nullptr));
  return memory;
}

using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, bool, bool, bool>;

constexpr size_t kMostPrepared = 256;

// The primitive that computes a product. oneDNN's primitives of a linear layer are faster than its matmul, most of all
// for the gradient of the weight, x^T y.
enum class Kind { kMatmul, kLinear, kWeightGradient };

inline Kind KindOf(const Key& key) {
  const auto [batch, m, k, n, turn_x, turn_y, has_bias] = key;
  if (batch > 1 || (turn_x && (turn_y || has_bias))) return Kind::kMatmul;
  return turn_x ? Kind::kWeightGradient : Kind::kLinear;
}

// Describes out [m, n] = x^T y as the weight gradient of a layer with input y [k, n] and upstream gradient x [k, m].
inline void* WeightGradient(const void* x, const void* y, const void* out, int64_t m, int64_t n) {
  void *forward = nullptr, *desc = nullptr, *weights = Describe({m, n}, false, kBfloat16);
  Check(dnnl_inner_product_forward_primitive_desc_create(&forward, Engine(), kForward, y, weights, nullptr, x, nullptr));
  Check(dnnl_inner_product_backward_weights_primitive_desc_create(&desc, Engine(), y, out, nullptr, x, forward,
                                                                  nullptr));
  Check(dnnl_primitive_desc_destroy(forward));
  Check(dnnl_memory_desc_destroy(weights));
  return desc;
}

inline const Product& Prepared(const Key& key) {
  // A primitive is valid for one number of threads, as in oneDNN's own cache.
  thread_local std::map<std::pair<Key, int>, Product> prepared;
  const std::pair of_threads(key, omp_in_parallel() ? 1 : omp_get_max_threads());
  const auto found = prepared.find(of_threads);
  if (found != prepared.end()) return found->second;
  const auto [batch, m, k, n, turn_x, turn_y, has_bias] = key;
  const auto dims = [batch = batch](int64_t rows, int64_t columns) {
    return batch == 1 ? Shape{rows, columns} : Shape{batch, rows, columns};
  };
  // A model has few shapes, but batches of different lengths and the rows of experts keep adding new shapes.
  if (prepared.size() >= kMostPrepared) {
    for (const auto& [_, product] : prepared) Destroy(product);
    prepared.clear();
  }
  void *x = nullptr, *y = nullptr, *out = Describe(dims(m, n), false, kFloat32);
  const Kind kind = KindOf(key);
  const Shape bias_shape = kind == Kind::kLinear ? Shape{n} : Shape{1, n};
  void *bias = has_bias ? Describe(bias_shape, false, kFloat32) : nullptr, *desc = nullptr, *primitive = nullptr;
  switch (kind) {
    case Kind::kMatmul:
      x = Describe(dims(m, k), turn_x, kBfloat16), y = Describe(dims(k, n), turn_y, kBfloat16);
      Check(dnnl_matmul_primitive_desc_create(&desc, Engine(), x, y, bias, out, nullptr));
      break;
    case Kind::kLinear:  // oneDNN's weights are [out, in]
      x = Describe({m, k}, false, kBfloat16), y = Describe({n, k}, !turn_y, kBfloat16);
      Check(dnnl_inner_product_forward_primitive_desc_create(&desc, Engine(), kForward, x, y, bias, out, nullptr));
      break;
    case Kind::kWeightGradient:
      x = Describe({k, m}, false, kBfloat16), y = Describe({k, n}, false, kBfloat16);
      desc = WeightGradient(x, y, out, m, n);
      break;
  }
  Check(dnnl_primitive_create(&primitive, desc));
  Product made{primitive, MemoryOf(x), MemoryOf(y), has_bias ? MemoryOf(bias) : nullptr, MemoryOf(out)};
  Check(dnnl_primitive_desc_destroy(desc));
  for (void* unused : {x, y, out, bias})
    if (unused != nullptr) Check(dnnl_memory_desc_destroy(unused));
  return prepared.emplace(of_threads, made).first->second;
}

// Computes out = x y + bias in float32, for x [batch, m, k] and y [batch, k, n]. An operand that the key marks as
// turned is stored transposed.
inline void Multiply(const Key& key, const uint16_t* x, const uint16_t* y, const float* bias, float* out) {
  thread_local void* stream = [] {
    void* made = nullptr;
    Check(dnnl_stream_create(&made, Engine(), kDefaultFlags));
    return made;
  }();
  const Product& product = Prepared(key);
  Check(dnnl_memory_set_data_handle(product.x, const_cast<uint16_t*>(x)));
  Check(dnnl_memory_set_data_handle(product.y, const_cast<uint16_t*>(y)));
  Check(dnnl_memory_set_data_handle(product.out, out));
  const bool is_gradient = KindOf(key) == Kind::kWeightGradient;
  Argument arguments[] = {{is_gradient ? kUpstream : kSource, product.x},
                          {is_gradient ? kSource : kWeights, product.y},
                          {is_gradient ? kWeightsGradient : kDestination, product.out},
                          {kBias, product.bias}};
  if (bias != nullptr) Check(dnnl_memory_set_data_handle(product.bias, const_cast<float*>(bias)));
  Check(dnnl_primitive_execute(product.primitive, stream, bias == nullptr ? 3 : 4, arguments));
  Check(dnnl_stream_wait(stream));
}

}  // namespace onednn
