// An operator that runs all blocks of a model on a few new positions. It is documented in fused_blocks.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <vector>

#include "few_bits.h"
#include "few_rows.h"
#include "vector_math.h"

#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/ext/tensor_compat.h"

namespace {

using paddle::Tensor;
using Tensors = std::vector<Tensor>;
using Optional = paddle::optional<Tensor>;

// ---- the layout, in the order of fused_blocks.py -------------------------------------------------------------------

enum Format : int64_t { kWhole, kPanels, kInt8, kInt4, kInt8Int8, kInt4Int8 };
enum Activation : int64_t { kGeluTanh, kGelu, kQuickGelu, kRelu, kReluSquared, kSwiglu };

// Reads the numbers of the layout in order, and the weights that they point to.
class Reader {
 public:
  Reader(const std::vector<int64_t>& layout, const Tensors& weights) : layout_(layout), weights_(weights) {}
  int64_t Number() {
    PD_CHECK(next_ < layout_.size(), "the layout is too short");
    return layout_[next_++];
  }
  const Tensor* Weight() {
    const int64_t index = Number();
    PD_CHECK(index < static_cast<int64_t>(weights_.size()), "there is no such weight");
    if (index < 0) return nullptr;
    PD_CHECK(weights_[index].is_cpu(), "this operator runs on a CPU");
    return &weights_[index];
  }
  const float* Floats(int64_t size) {
    const Tensor* weight = Weight();
    PD_CHECK(weight == nullptr || weight->numel() == size, "a weight does not fit");
    return weight == nullptr ? nullptr : weight->data<float>();
  }
  bool AtEnd() const { return next_ == layout_.size(); }

 private:
  const std::vector<int64_t>& layout_;
  const Tensors& weights_;
  size_t next_ = 0;
};

struct Linear {
  int64_t format;
  few_bits::Matrix matrix;

  Linear(Reader& reader, int64_t size) {
    format = reader.Number();
    const Tensor *values = reader.Weight(), *scales = reader.Weight();
    matrix.size = size;
    matrix.columns = reader.Number();
    matrix.bias = reader.Floats(matrix.columns);
    PD_CHECK(values != nullptr && (scales != nullptr) == (format >= kInt8), "a matrix lacks something");
    const bool are_halves = scales != nullptr && scales->dtype() == paddle::DataType::FLOAT16;
    PD_CHECK(!are_halves || format >= kInt8, "a matrix of this format has no offsets");
    if (scales == nullptr) matrix.SetScales(nullptr, 1, false);
    else if (are_halves) matrix.SetScales(scales->data<paddle::float16>(), scales->shape()[1], true);
    else matrix.SetScales(scales->data<float>(), scales->shape()[1], false);
    const int64_t panels = matrix.Panels(), width = few_bits::kWidth;
    const auto up = [&](int64_t multiple) { return (size + multiple - 1) / multiple * multiple; };
    int64_t expected = size * matrix.columns;
    if (format == kPanels) expected = panels * size * width;
    if (format == kInt8) expected = panels * up(few_bits::kBlock) * width;
    if (format == kInt4 || format == kInt4Int8) expected = panels * up(few_bits::kBlock) * width / 2;
    if (format == kInt8Int8) expected = panels * up(few_bits::kQuad) * width;
    PD_CHECK(values->numel() == expected && (!scales || scales->numel() == panels * scales->shape()[1] * width) && matrix.groups > 0 &&
                 (matrix.groups == 1 || (size % matrix.groups == 0 && size / matrix.groups % few_bits::kBlock == 0)),
             "panels do not fit");
    PD_CHECK(format < kInt8Int8 || size <= few_bits::kMostInputs, "too many input features");
    if (format <= kPanels) matrix.values = reinterpret_cast<const int8_t*>(values->data<float>());
    else if (format == kInt4 || format == kInt4Int8) matrix.values = reinterpret_cast<const int8_t*>(values->data<uint8_t>());
    else matrix.values = values->data<int8_t>();
  }

  void operator()(const float* x, int64_t rows, float* y) const {
    const auto* values = reinterpret_cast<const float*>(matrix.values);
    if (format == kWhole) few_rows::WholeProduct(x, rows, matrix.size, values, matrix.bias, matrix.columns, y);
    else if (format == kPanels) few_rows::Product(x, rows, matrix.size, values, matrix.bias, matrix.columns, y);
    else if (format == kInt8) few_bits::ProductOf<few_bits::EightBits>(x, rows, matrix, y);
    else if (format == kInt4) few_bits::ProductOf<few_bits::FourBits>(x, rows, matrix, y);
    else if (format == kInt8Int8) few_bits::ProductOf<few_bits::EightBitQuads>(x, rows, matrix, y);
    else few_bits::ProductOf<few_bits::FourBitBlocks>(x, rows, matrix, y);
  }
};

struct Norm {
  const float *weight, *bias;
  int64_t size;
  float epsilon;
  Norm(Reader& reader, int64_t size, float epsilon)
      : weight(reader.Floats(size)), bias(reader.Floats(size)), size(size), epsilon(epsilon) {}
  explicit operator bool() const { return weight != nullptr; }
  void operator()(const float* from, int64_t rows, float* to) const {
    for (int64_t row = 0; row < rows; ++row)
      vector_math::Normalize(from + row * size, size, weight, bias, epsilon, to + row * size);
  }
};

struct Shape {
  int64_t hidden, groups, per_group, head_dim, rotary_dim, activation, inner, parallel, layers;
  Shape(Reader& reader, int64_t hidden)
      : hidden(hidden), groups(reader.Number()), per_group(reader.Number()), head_dim(reader.Number()),
        rotary_dim(reader.Number()), activation(reader.Number()), inner(reader.Number()), parallel(reader.Number()),
        layers(reader.Number()) {
    PD_CHECK(groups > 0 && per_group > 0 && head_dim > 0 && rotary_dim >= 0 && rotary_dim <= head_dim &&
                 rotary_dim % 2 == 0 && inner > 0 && layers > 0 && activation >= kGeluTanh && activation <= kSwiglu,
             "no such block");
  }
  int64_t Wide() const { return activation == kSwiglu ? 2 * inner : inner; }
  int64_t QkvWidth() const { return groups * (per_group + 2) * head_dim; }
  int64_t ContextWidth() const { return groups * per_group * head_dim; }
};

struct Block {
  Linear qkv, out_proj, fc1, fc2;
  Norm input_norm, attention_post_norm, mlp_norm, mlp_post_norm, q_norm, k_norm;
  Block(Reader& reader, const Shape& shape, float epsilon)
      : qkv(reader, shape.hidden), out_proj(reader, shape.ContextWidth()), fc1(reader, shape.hidden),
        fc2(reader, shape.inner), input_norm(reader, shape.hidden, epsilon),
        attention_post_norm(reader, shape.hidden, epsilon), mlp_norm(reader, shape.hidden, epsilon),
        mlp_post_norm(reader, shape.hidden, epsilon), q_norm(reader, shape.head_dim, epsilon),
        k_norm(reader, shape.head_dim, epsilon) {
    PD_CHECK(qkv.matrix.columns == shape.QkvWidth() && out_proj.matrix.columns == shape.hidden &&
                 fc1.matrix.columns == shape.Wide() && fc2.matrix.columns == shape.hidden && input_norm && mlp_norm,
             "a block does not fit");
  }
};

// ---- attention ---------------------------------------------------------------------------------------------------

// A pass over s new positions of b rows. The cache has k columns. The new positions use s columns from index `past`.
struct Pass {
  int64_t positions, batch, past, columns;
  const float *penalty, *cos, *sin;  // [b or 1][s][k] or null; [b][s][rotary_dim / 2] or null
  int64_t penalty_stride;            // distance between the penalties of two rows; 0 if all rows share them
};

// Rotates the pairs of a head: number i of the first half with number i of the second half. `size` is the number of
// rotated features.
void Rotate(float* head, int64_t size, const float* cos, const float* sin) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cos[i] - second * sin[i];
    head[i + half] = second * cos[i] + first * sin[i];
  }
}

// Computes attention for one key/value head of one row, whose cached keys and values are `keys, values [k][d]`.
// Overwrites `qkv [s][b][g][r + 2][d]`.
void AttendHead(const Shape& shape, const Pass& pass, const Block& block, int64_t row, int64_t group, float* qkv,
                float* keys, float* values, float* context, std::vector<float>& scores) {
  const int64_t size = shape.head_dim, heads = shape.per_group, width = (heads + 2) * size;
  for (int64_t s = 0; s < pass.positions; ++s) {
    float* head = qkv + ((s * pass.batch + row) * shape.groups + group) * width;
    for (int64_t h = 0; h <= heads; ++h, head += size) {
      const Norm& norm = h < heads ? block.q_norm : block.k_norm;
      if (norm) norm(head, 1, head);
      const int64_t angles = (row * pass.positions + s) * shape.rotary_dim / 2;
      if (pass.cos != nullptr) Rotate(head, shape.rotary_dim, pass.cos + angles, pass.sin + angles);
    }
    std::copy_n(head - size, size, keys + (pass.past + s) * size);
    std::copy_n(head, size, values + (pass.past + s) * size);
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(size));
  for (int64_t s = 0; s < pass.positions; ++s) {
    const int64_t seen = pass.past + s + 1;
    const float* penalty =
        pass.penalty ? pass.penalty + row * pass.penalty_stride + s * pass.columns : nullptr;
    for (int64_t h = 0; h < heads; ++h) {
      float* query = qkv + ((s * pass.batch + row) * shape.groups + group) * width + h * size;
      for (int64_t i = 0; i < size; ++i) query[i] *= scale;
      vector_math::Dots(query, keys, seen, size, scores.data());
      if (penalty != nullptr)
        for (int64_t k = 0; k < seen; ++k) scores[k] += penalty[k];
      vector_math::Softmax(scores.data(), seen);
      float* to = context + ((s * pass.batch + row) * shape.groups + group) * heads * size + h * size;
      std::fill_n(to, size, 0.0f);
      vector_math::AddRows(scores.data(), seen, values, size, to);
    }
  }
}

void Attend(const Shape& shape, const Pass& pass, const Block& block, float* qkv, float* keys, float* values,
            float* context) {
  const int64_t per_head = pass.columns * shape.head_dim;
#pragma omp parallel
  {
    std::vector<float> scores(pass.past + pass.positions);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < pass.batch * shape.groups; ++i)
      AttendHead(shape, pass, block, i / shape.groups, i % shape.groups, qkv, keys + i * per_head,
                 values + i * per_head, context, scores);
  }
}

// ---- feed-forward, and the block -----------------------------------------------------------------------------------

// Applies the activation to fc1's output, `wide [rows][Wide]`, in place. A gated activation leaves fc2's input
// [rows][inner] at the beginning of `wide`.
void Activate(const Shape& shape, float* wide, int64_t rows) {
  using namespace vector_math;
  const int64_t size = rows * shape.Wide();
  switch (shape.activation) {
    case kGeluTanh: return Map(wide, size, wide, GeluTanh);
    case kGelu: return Map(wide, size, wide, Gelu);
    case kQuickGelu: return Map(wide, size, wide, QuickGelu);
    case kRelu: return Map(wide, size, wide, Relu);
    case kReluSquared: return Map(wide, size, wide, [](Vector x) { return Relu(x) * Relu(x); });
  }
  constexpr int64_t kChunk = 16 * kLanes;
  float gate[kChunk], up[kChunk];  // for kSwiglu, whose input alternates gate and up
  int64_t i = 0;
  const auto split = [&](int64_t count) {
    const float* pairs = wide + 2 * i;
    for (int64_t j = 0; j < count; ++j) gate[j] = pairs[2 * j], up[j] = pairs[2 * j + 1];
  };
  for (; i + kChunk <= rows * shape.inner; i += kChunk) {
    split(kChunk);
    for (int64_t j = 0; j < kChunk; j += kLanes) Store(wide + i + j, Silu(Load(gate + j)) * Load(up + j));
  }
  const int64_t rest = rows * shape.inner - i;
  split(rest);
  Map(gate, rest, gate, Silu);
  for (int64_t j = 0; j < rest; ++j) wide[i + j] = gate[j] * up[j];
}

// Allocates arrays that begin at a cache line. The product of one row loads and stores its sums again and again, which
// takes up to 10 % longer if each SIMD vector lies across two lines.
template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{64};
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kAlignment)); }
  void deallocate(T* pointer, size_t) { ::operator delete(pointer, kAlignment); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};
using Floats = std::vector<float, LineAllocator<float>>;

// Memory for intermediate results. Results that are not needed at the same time share a buffer.
struct Scratch {
  Floats normed, wide, context, branch;
  Scratch(const Shape& shape, int64_t rows)
      : normed(rows * shape.hidden), wide(rows * std::max(shape.QkvWidth(), shape.Wide())),
        context(rows * shape.ContextWidth()), branch(rows * shape.hidden) {}
};

void Add(Floats& branch, const Norm& norm, int64_t rows, float* hidden) {
  if (norm) norm(branch.data(), rows, branch.data());
  for (size_t i = 0; i < branch.size(); ++i) hidden[i] += branch[i];
}

void Run(const Shape& shape, const Pass& pass, const Block& block, float* hidden, float* keys, float* values,
         Scratch& scratch) {
  const int64_t rows = pass.positions * pass.batch;
  auto& [normed, wide, context, branch] = scratch;
  block.input_norm(hidden, rows, normed.data());
  block.qkv(normed.data(), rows, wide.data());
  Attend(shape, pass, block, wide.data(), keys, values, context.data());
  block.out_proj(context.data(), rows, branch.data());
  if (shape.parallel) block.mlp_norm(hidden, rows, normed.data());  // reads the same input as attention
  Add(branch, block.attention_post_norm, rows, hidden);
  if (!shape.parallel) block.mlp_norm(hidden, rows, normed.data());
  block.fc1(normed.data(), rows, wide.data());
  Activate(shape, wide.data(), rows);
  block.fc2(wide.data(), rows, branch.data());
  Add(branch, block.mlp_post_norm, rows, hidden);
}

// ---- operator ------------------------------------------------------------------------------------------------------

const float* FloatsOf(const Optional& tensor, int64_t size) {
  PD_CHECK(!tensor || (tensor->is_cpu() && tensor->numel() == size), "angles or penalties do not fit");
  return tensor ? tensor->data<float>() : nullptr;
}

std::vector<Tensor> Trunk(const Tensor& hidden, const Tensor& column, const Optional& penalty, const Optional& cos,
                          const Optional& sin, Tensors& cache, const Tensors& weights,
                          const std::vector<int64_t>& layout, float epsilon) {
  PD_CHECK(hidden.is_cpu() && column.is_cpu() && hidden.shape().size() == 3, "this operator runs on a CPU");
  Reader reader(layout, weights);
  const Shape shape(reader, hidden.shape()[2]);
  PD_CHECK(static_cast<int64_t>(cache.size()) == 2 * shape.layers, "the cache does not fit");
  Pass pass{hidden.shape()[0], hidden.shape()[1], column.data<int64_t>()[0], cache[0].shape()[2]};
  const int64_t rows = pass.positions * pass.batch;
  PD_CHECK(pass.past >= 0 && pass.past + pass.positions <= pass.columns, "the cache has no room");
  PD_CHECK(static_cast<bool>(cos) == (shape.rotary_dim > 0) && static_cast<bool>(sin) == static_cast<bool>(cos),
           "angles or penalties do not fit");
  pass.cos = FloatsOf(cos, rows * shape.rotary_dim / 2);
  pass.sin = FloatsOf(sin, rows * shape.rotary_dim / 2);
  const bool for_each_row = penalty && penalty->shape()[0] == pass.batch;
  pass.penalty_stride = for_each_row ? pass.positions * pass.columns : 0;
  pass.penalty = FloatsOf(penalty, (for_each_row ? pass.batch : 1) * pass.positions * pass.columns);
  auto out = paddle::empty(hidden.shape(), hidden.dtype(), hidden.place());
  std::copy_n(hidden.data<float>(), hidden.numel(), out.data<float>());
  Scratch scratch(shape, rows);
  const int64_t expected = pass.batch * shape.groups * pass.columns * shape.head_dim;
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    Tensor &keys = cache[2 * layer], &values = cache[2 * layer + 1];
    PD_CHECK(keys.is_cpu() && keys.numel() == expected && values.numel() == expected, "the cache does not fit");
    const Block block(reader, shape, epsilon);
    Run(shape, pass, block, out.data<float>(), keys.data<float>(), values.data<float>(), scratch);
  }
  const Norm final_norm(reader, shape.hidden, epsilon);
  PD_CHECK(final_norm && reader.AtEnd(), "the layout does not fit");
  final_norm(out.data<float>(), rows, out.data<float>());
  return {out};
}

std::vector<std::vector<int64_t>> TrunkShape(const std::vector<int64_t>& hidden, const std::vector<int64_t>&,
                                             const paddle::optional<std::vector<int64_t>>&,
                                             const paddle::optional<std::vector<int64_t>>&,
                                             const paddle::optional<std::vector<int64_t>>&,
                                             const std::vector<std::vector<int64_t>>&,
                                             const std::vector<std::vector<int64_t>>&) {
  return {hidden};
}

std::vector<paddle::DataType> TrunkType(paddle::DataType hidden, paddle::DataType,
                                        const paddle::optional<paddle::DataType>&,
                                        const paddle::optional<paddle::DataType>&,
                                        const paddle::optional<paddle::DataType>&,
                                        const std::vector<paddle::DataType>&, const std::vector<paddle::DataType>&) {
  return {hidden};
}

}  // namespace

PD_BUILD_OP(ppfleetx_trunk)
    .Inputs({"Hidden", "Column", paddle::Optional("Penalty"), paddle::Optional("Cos"), paddle::Optional("Sin"),
             paddle::Vec("Cache"), paddle::Vec("Weights")})
    .Outputs({"Out", paddle::Vec("CacheOut")})
    .Attrs({"layout: std::vector<int64_t>", "epsilon: float"})
    .SetInplaceMap({{paddle::Vec("Cache"), paddle::Vec("CacheOut")}})
    .SetKernelFn(PD_KERNEL(Trunk))
    .SetInferShapeFn(PD_INFER_SHAPE(TrunkShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(TrunkType));
