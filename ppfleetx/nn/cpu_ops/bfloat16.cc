// Operators for training in bfloat16 on a CPU. They are documented in bfloat16.py.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <vector>

#include "causal_attention.h"
#include "onednn.h"

#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"

namespace {

using onednn::Round;
using paddle::DataType;
using paddle::Tensor;
using Shape = std::vector<int64_t>;

const uint16_t* BitsOf(const Tensor& tensor) {
  return reinterpret_cast<const uint16_t*>(tensor.data<paddle::bfloat16>());
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

struct Sizes {
  int64_t batch, m, k, n;
  Shape result;
};

// Returns the sizes of the product of x [..., m, k] and y [..., k, n], or of x [..., k] and y [k, n]. With turn_x
// (turn_y), the last two dimensions of x (y) are swapped.
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
  const Tensor left = InBfloat16(x), right = InBfloat16(y);
  onednn::Multiply({sizes.batch, sizes.m, sizes.k, sizes.n, turn_x, turn_y, bias.is_initialized()}, BitsOf(left),
                   BitsOf(right), bias ? bias->data<float>() : nullptr, out.data<float>());
  return {out};
}

std::vector<Shape> MatmulShape(const Shape& x, const Shape& y, const paddle::optional<Shape>&, bool turn_x,
                               bool turn_y) {
  return {SizesOf(x, y, turn_x, turn_y).result};
}

std::vector<DataType> MatmulType(DataType, DataType, const paddle::optional<DataType>&) { return {DataType::FLOAT32}; }

// ---- the conversion to bfloat16, with and without the sums of the columns ----------------------------------------

std::vector<Tensor> Cast(const Tensor& x) { return {InBfloat16(x)}; }
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

// ---- causal attention --------------------------------------------------------------------------------------------

// Queries are [b, g, r, s, d], keys [b, g, s, d], values [b, g, s, e].
struct Heads {
  int64_t count, per_group, groups;  // query heads of all rows, query heads per key/value head, key/value heads
  causal_attention::Sizes sizes;
  const int32_t* starts;

  Heads(const Tensor& query, const Tensor& value, const paddle::optional<Tensor>& start, float scale) {
    const Shape shape = query.shape();
    per_group = shape[2], groups = shape[1], count = shape[0] * groups * per_group;
    sizes = {shape[3], shape[4], value.shape().back(), scale, nullptr};
    starts = start ? start->data<int32_t>() : nullptr;
  }
  causal_attention::Sizes Of(int64_t head) const {
    auto its = sizes;
    if (starts != nullptr) its.start = starts + head / (per_group * groups) * sizes.positions;
    return its;
  }
  int64_t Size() const { return sizes.positions * sizes.width; }
  int64_t ValueSize() const { return sizes.positions * sizes.value_width; }
};

// Calls of(i) for each i below count, on all threads. An exception cannot leave a thread, so it is thrown at the end.
template <class Of>
void InParallel(int64_t count, const Of& of) {
  std::exception_ptr error;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i) try {
      of(i);
    } catch (...) {
#pragma omp critical
      error = std::current_exception();
    }
  if (error) std::rethrow_exception(error);
}

void CheckAttention(const Tensor& query, const Tensor& key, const Tensor& value, const paddle::optional<Tensor>& start) {
  const Shape q = query.shape(), k = key.shape(), v = value.shape();
  PD_CHECK(q.size() == 5 && k == Shape({q[0], q[1], q[3], q[4]}) && v.size() == 4 && Shape(v.begin(), v.end() - 1) ==
               Shape({q[0], q[1], q[3]}) && (!start || start->shape() == Shape({q[0], q[3]})),
           "queries, keys and values do not fit");
}

std::vector<Tensor> Attention(const Tensor& query, const Tensor& key, const Tensor& value,
                              const paddle::optional<Tensor>& start, float scale) {
  CheckAttention(query, key, value, start);
  const Heads heads(query, value, start, scale);
  Shape shape = query.shape();
  auto logarithms = paddle::empty(Shape(shape.begin(), shape.end() - 1), DataType::FLOAT32, query.place());
  shape.back() = heads.sizes.value_width;
  auto out = paddle::empty(shape, DataType::FLOAT32, query.place());
  const float *q = query.data<float>(), *k = key.data<float>(), *v = value.data<float>();
  float *to = out.data<float>(), *sums = logarithms.data<float>();
  InParallel(heads.count, [&](int64_t head) {
    const int64_t group = head / heads.per_group;
    causal_attention::Forward(heads.Of(head), q + head * heads.Size(), k + group * heads.Size(),
                              v + group * heads.ValueSize(), to + head * heads.ValueSize(),
                              sums + head * heads.sizes.positions);
  });
  return {out, logarithms};
}

std::vector<Shape> AttentionShape(const Shape& query, const Shape&, const Shape& value, const paddle::optional<Shape>&,
                                  float) {
  Shape out = query;
  out.back() = value.back();
  return {out, {query.begin(), query.end() - 1}};
}

std::vector<DataType> AttentionType(DataType, DataType, DataType, const paddle::optional<DataType>&) {
  return {DataType::FLOAT32, DataType::FLOAT32};
}

std::vector<Tensor> AttentionGrad(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const paddle::optional<Tensor>& start, const Tensor& out, const Tensor& logarithms,
                                  const Tensor& upstream, float scale) {
  const Heads heads(query, value, start, scale);
  auto of_query = paddle::zeros(query.shape(), DataType::FLOAT32, query.place());
  auto of_key = paddle::zeros(key.shape(), DataType::FLOAT32, query.place());
  auto of_value = paddle::zeros(value.shape(), DataType::FLOAT32, query.place());
  const float *q = query.data<float>(), *k = key.data<float>(), *v = value.data<float>();
  const float *to = out.data<float>(), *sums = logarithms.data<float>(), *of_out = upstream.data<float>();
  float *of_q = of_query.data<float>(), *of_k = of_key.data<float>(), *of_v = of_value.data<float>();
  InParallel(heads.count / heads.per_group, [&](int64_t group) {
    for (int64_t head = group * heads.per_group; head < (group + 1) * heads.per_group; ++head)
      causal_attention::Backward(heads.Of(head), q + head * heads.Size(), k + group * heads.Size(),
                                 v + group * heads.ValueSize(), to + head * heads.ValueSize(),
                                 sums + head * heads.sizes.positions, of_out + head * heads.ValueSize(),
                                 of_q + head * heads.Size(), of_k + group * heads.Size(),
                                 of_v + group * heads.ValueSize());
  });
  return {of_query, of_key, of_value};
}

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
    .SetInferDtypeFn(PD_INFER_DTYPE(CastType));

PD_BUILD_OP(ppfleetx_bfloat16_cast_and_sum)
    .Inputs({"X"})
    .Outputs({"Out", "Sums"})
    .SetKernelFn(PD_KERNEL(CastAndSum))
    .SetInferShapeFn(PD_INFER_SHAPE(CastAndSumShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(CastAndSumType));

PD_BUILD_OP(ppfleetx_bfloat16_attention)
    .Inputs({"Query", "Key", "Value", paddle::Optional("Start")})
    .Outputs({"Out", "Logarithms"})
    .Attrs({"scale: float"})
    .SetKernelFn(PD_KERNEL(Attention))
    .SetInferShapeFn(PD_INFER_SHAPE(AttentionShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(AttentionType));

PD_BUILD_GRAD_OP(ppfleetx_bfloat16_attention)
    .Inputs({"Query", "Key", "Value", paddle::Optional("Start"), "Out", "Logarithms", paddle::Grad("Out")})
    .Outputs({paddle::Grad("Query"), paddle::Grad("Key"), paddle::Grad("Value")})
    .Attrs({"scale: float"})
    .SetKernelFn(PD_KERNEL(AttentionGrad));
