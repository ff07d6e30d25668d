// Products of bfloat16 numbers with float32 sums, by the oneDNN that Paddle's wheel brings. bfloat16.py says
// what they compute.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"

// The wheel has the library without its headers: what is used of its C interface (oneDNN 3).
extern "C" {
int dnnl_engine_create(void** engine, int kind, size_t index);
int dnnl_stream_create(void** stream, void* engine, unsigned flags);
int dnnl_memory_desc_create_with_strides(void** desc, int ndims, const int64_t* dims, int type, const int64_t* strides);
int dnnl_memory_create(void** memory, const void* desc, void* engine, void* handle);
int dnnl_memory_set_data_handle(void* memory, void* handle);
int dnnl_matmul_primitive_desc_create(void** desc, void* engine, const void* source, const void* weights,
                                      const void* bias, const void* destination, const void* attributes);
int dnnl_primitive_create(void** primitive, const void* desc);
struct Argument {
  int index;
  void* memory;
};
int dnnl_primitive_execute(const void* primitive, void* stream, int count, const Argument* arguments);
int dnnl_stream_wait(void* stream);
}

namespace {

using paddle::DataType;
using paddle::Tensor;
using Shape = std::vector<int64_t>;

constexpr int kCpu = 1, kDefaultFlags = 1, kBfloat16 = 2, kFloat32 = 3;  // dnnl_types.h
constexpr int kSource = 1, kDestination = 17, kWeights = 33, kBias = 41;

void Check(int status) { PD_CHECK(status == 0, "oneDNN refuses a product, status ", status); }

// ---- conversion: to the nearest, of two the even one ------------------------------------------------------------

uint16_t Rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

void Round(const float* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  for (; i + 32 <= count; i += 32) {
    const __m512bh pair = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
    _mm512_storeu_si512(to + i, (__m512i)pair);
  }
#endif
  for (; i < count; ++i) to[i] = Rounded(from[i]);
}

uint16_t* BitsOf(Tensor& tensor) { return reinterpret_cast<uint16_t*>(tensor.data<paddle::bfloat16>()); }

Tensor InBfloat16(const Tensor& x) {
  if (x.dtype() == DataType::BFLOAT16) return x;
  PD_CHECK(x.is_cpu() && x.dtype() == DataType::FLOAT32, "operands are float32 or bfloat16, on a CPU");
  auto low = paddle::empty(x.shape(), DataType::BFLOAT16, x.place());
  const float* from = x.data<float>();
  uint16_t* to = BitsOf(low);
  const int64_t count = x.numel(), block = 1 << 14;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i += block) Round(from + i, std::min(block, count - i), to + i);
  return low;
}

// ---- products ----------------------------------------------------------------------------------------------------

struct Product {
  void *primitive, *source, *weights, *bias, *destination;
};

void* Engine() {
  static void* engine = [] {
    void* made = nullptr;
    Check(dnnl_engine_create(&made, kCpu, 0));
    return made;
  }();
  return engine;
}

// [batch, rows, columns] stored row by row; if turned, stored as its transpose.
void* Describe(const Shape& dims, bool turned, int type) {
  const int64_t rows = dims[dims.size() - 2], columns = dims.back();
  Shape strides = {rows * columns, turned ? 1 : columns, turned ? rows : 1};
  if (dims.size() == 2) strides.erase(strides.begin());
  void* desc = nullptr;
  Check(dnnl_memory_desc_create_with_strides(&desc, dims.size(), dims.data(), type, strides.data()));
  return desc;
}

void* MemoryOf(const void* desc) {
  void* memory = nullptr;
  Check(dnnl_memory_create(&memory, desc, Engine(), nullptr));
  return memory;
}

using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, bool, bool, bool>;

const Product& Prepared(const Key& key) {
  thread_local std::map<Key, Product> prepared;  // one of each shape of a model
  const auto found = prepared.find(key);
  if (found != prepared.end()) return found->second;
  const auto [batch, m, k, n, turn_x, turn_y, has_bias] = key;
  const auto dims = [batch = batch](int64_t rows, int64_t columns) {
    return batch == 1 ? Shape{rows, columns} : Shape{batch, rows, columns};
  };
  const void *x = Describe(dims(m, k), turn_x, kBfloat16), *y = Describe(dims(k, n), turn_y, kBfloat16);
  const void *out = Describe(dims(m, n), false, kFloat32), *bias = has_bias ? Describe({1, n}, false, kFloat32) : nullptr;
  void *desc = nullptr, *primitive = nullptr;
  Check(dnnl_matmul_primitive_desc_create(&desc, Engine(), x, y, bias, out, nullptr));
  Check(dnnl_primitive_create(&primitive, desc));
  Product made{primitive, MemoryOf(x), MemoryOf(y), has_bias ? MemoryOf(bias) : nullptr, MemoryOf(out)};
  return prepared.emplace(key, made).first->second;
}

struct Sizes {
  int64_t batch, m, k, n;
  Shape result;
};

// Of x [..., m, k] and y [..., k, n], or of x [..., k] and y [k, n]; stored transposed where a flag says so.
Sizes SizesOf(const Shape& x, const Shape& y, bool turn_x, bool turn_y) {
  PD_CHECK(x.size() >= 2 && y.size() >= 2 && (y.size() == 2 || x.size() == y.size()), "operands do not fit");
  const int64_t y_rows = y[y.size() - 2], y_columns = y.back();
  Sizes sizes{1, x[x.size() - 2], x.back(), turn_y ? y_rows : y_columns, {x.begin(), x.end() - 2}};
  for (size_t i = 0; i + 2 < x.size(); ++i) {
    PD_CHECK(y.size() == 2 || x[i] == y[i], "operands do not fit");
    sizes.batch *= x[i];
  }
  if (y.size() == 2 && !turn_x) {
    sizes.m *= sizes.batch;
    sizes.batch = 1;
  }
  PD_CHECK(!turn_x || y.size() > 2 || sizes.batch == 1, "operands do not fit");
  if (turn_x) std::swap(sizes.m, sizes.k);
  PD_CHECK(sizes.k == (turn_y ? y_columns : y_rows), "operands do not fit");
  sizes.result.push_back(turn_x ? x.back() : x[x.size() - 2]);
  sizes.result.push_back(sizes.n);
  return sizes;
}

std::vector<Tensor> Matmul(const Tensor& x, const Tensor& y, const paddle::optional<Tensor>& bias, bool turn_x,
                           bool turn_y) {
  const Sizes sizes = SizesOf(x.shape(), y.shape(), turn_x, turn_y);
  PD_CHECK(!bias || (bias->numel() == sizes.n && bias->dtype() == DataType::FLOAT32), "the bias does not fit");
  auto out = paddle::empty(sizes.result, DataType::FLOAT32, x.place());
  if (out.numel() == 0) return {out};
  if (sizes.k == 0) {
    std::fill_n(out.data<float>(), out.numel(), 0.0f);
    return {out};
  }
  Tensor left = InBfloat16(x), right = InBfloat16(y);
  thread_local void* stream = [] {
    void* made = nullptr;
    Check(dnnl_stream_create(&made, Engine(), kDefaultFlags));
    return made;
  }();
  const Product& product = Prepared({sizes.batch, sizes.m, sizes.k, sizes.n, turn_x, turn_y, bias.is_initialized()});
  Check(dnnl_memory_set_data_handle(product.source, BitsOf(left)));
  Check(dnnl_memory_set_data_handle(product.weights, BitsOf(right)));
  Check(dnnl_memory_set_data_handle(product.destination, out.data<float>()));
  std::vector<Argument> arguments = {
      {kSource, product.source}, {kWeights, product.weights}, {kDestination, product.destination}};
  if (bias) {
    Check(dnnl_memory_set_data_handle(product.bias, const_cast<float*>(bias->data<float>())));
    arguments.push_back({kBias, product.bias});
  }
  Check(dnnl_primitive_execute(product.primitive, stream, arguments.size(), arguments.data()));
  Check(dnnl_stream_wait(stream));
  return {out};
}

std::vector<Shape> MatmulShape(const Shape& x, const Shape& y, const paddle::optional<Shape>&, bool turn_x,
                               bool turn_y) {
  return {SizesOf(x, y, turn_x, turn_y).result};
}

std::vector<DataType> MatmulType(DataType, DataType, const paddle::optional<DataType>&) { return {DataType::FLOAT32}; }

// ---- a conversion alone, and one that also sums the columns ------------------------------------------------------

std::vector<Tensor> Cast(const Tensor& x) { return {InBfloat16(x)}; }
std::vector<Shape> CastShape(const Shape& x) { return {x}; }
std::vector<DataType> CastType(DataType) { return {DataType::BFLOAT16}; }

constexpr int64_t kStrip = 64;

std::vector<Tensor> CastAndSum(const Tensor& x) {
  PD_CHECK(x.is_cpu() && x.dtype() == DataType::FLOAT32, "what is summed is float32, on a CPU");
  const int64_t columns = x.shape().back(), rows = columns ? x.numel() / columns : 0;
  auto low = paddle::empty(x.shape(), DataType::BFLOAT16, x.place());
  auto sums = paddle::empty({columns}, DataType::FLOAT32, x.place());
  const float* from = x.data<float>();
  uint16_t* to = BitsOf(low);
  float* totals = sums.data<float>();
#pragma omp parallel for schedule(static)
  for (int64_t begin = 0; begin < columns; begin += kStrip) {
    const int64_t width = std::min(kStrip, columns - begin);
    float part[kStrip] = {};
    for (int64_t row = 0; row < rows; ++row) {
      const float* values = from + row * columns + begin;
      if (width == kStrip)
        for (int64_t i = 0; i < kStrip; ++i) part[i] += values[i];
      else
        for (int64_t i = 0; i < width; ++i) part[i] += values[i];
      Round(values, width, to + row * columns + begin);
    }
    std::copy_n(part, width, totals + begin);
  }
  return {low, sums};
}

std::vector<Shape> CastAndSumShape(const Shape& x) { return {x, {x.back()}}; }
std::vector<DataType> CastAndSumType(DataType) { return {DataType::BFLOAT16, DataType::FLOAT32}; }

}  // namespace

PD_BUILD_OP(ppfleetx_bfloat16_matmul)
    .Inputs({"X", "Y", paddle::Optional("Bias")})
    .Outputs({"Out"})
    .Attrs({"turn_x: bool", "turn_y: bool"})
    .SetKernelFn(PD_KERNEL(Matmul))
    .SetInferShapeFn(PD_INFER_SHAPE(MatmulShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(MatmulType));

PD_BUILD_OP(ppfleetx_bfloat16_cast)
    .Inputs({"X"})
    .Outputs({"Out"})
    .SetKernelFn(PD_KERNEL(Cast))
    .SetInferShapeFn(PD_INFER_SHAPE(CastShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(CastType));

PD_BUILD_OP(ppfleetx_bfloat16_cast_and_sum)
    .Inputs({"X"})
    .Outputs({"Out", "Sums"})
    .SetKernelFn(PD_KERNEL(CastAndSum))
    .SetInferShapeFn(PD_INFER_SHAPE(CastAndSumShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(CastAndSumType));
