// Paddle's CPU kernels, registered a second time for the device.
//
// The dynamic graph calls a kernel through a pointer of its own C++ type. One handler serves all of them: each kernel
// gets a thunk of 22 bytes that says which kernel it is, calls_x86_64.S lays the arguments down as words, and the
// kernel's own description says what each word is. The handler allocates the outputs on the calling thread, puts
// tensors over the same bytes in place of the arguments, and lets the CPU kernel run in the stream's queue. The queue
// holds no reference to memory of the device: what is freed too early is found.
#include "kernels.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <typeindex>
#include <vector>

#include "counters.h"
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/backends/cpu/cpu_context.h"
#include "paddle/phi/backends/custom/custom_context.h"
#include "paddle/phi/common/bfloat16.h"
#include "paddle/phi/common/float16.h"
#include "paddle/phi/common/int_array.h"
#include "paddle/phi/common/scalar.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/kernel_context.h"
#include "paddle/phi/core/kernel_factory.h"
#include "paddle/phi/core/tensor_utils.h"
#include "paddle/phi/kernels/adamw_kernel.h"
#include "paddle/phi/kernels/sgd_kernel.h"
#include "stream.h"

namespace reference {

using paddle::optional;
using phi::DataType;
using phi::DenseTensor;
using phi::dtype::bfloat16;
using phi::dtype::float16;

// ------------------------------------------------------------------------------------- what a kernel looks like

// Values that arguments point to and that must live until the kernel has run.
using Kept = std::vector<std::shared_ptr<void>>;

template <class T>
static uint64_t keep(Kept& kept, const T& value) {
  auto copy = std::make_shared<T>(value);
  kept.push_back(copy);
  return reinterpret_cast<uint64_t>(copy.get());
}

template <class T>
static uint64_t as_word(T value) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}

enum class Role { kInput, kOptionalInput, kInputs, kOptionalInputs, kOutput, kOutputs, kAttribute, kType };

struct Parameter {
  Role role;
  bool in_vector_register = false;  // float and double
  // Of an attribute that is passed by reference: a copy, for the caller's may be gone when the kernel runs.
  uint64_t (*copy)(Kept&, uint64_t word) = nullptr;
  // Of an attribute: its word, out of a KernelContext.
  uint64_t (*take)(Kept&, phi::KernelContext&, size_t index) = nullptr;
};

template <class T>
static Parameter by_value(Role role = Role::kAttribute) {
  auto take = [](Kept&, phi::KernelContext& context, size_t index) { return as_word(context.AttrAt<T>(index)); };
  return {role, std::is_floating_point<T>::value, nullptr, take};
}

template <class T>
static Parameter by_reference() {
  auto copy = [](Kept& kept, uint64_t word) { return keep(kept, *reinterpret_cast<const T*>(word)); };
  auto take = [](Kept& kept, phi::KernelContext& context, size_t index) {
    return keep<T>(kept, context.AttrAt<T>(index));
  };
  return {Role::kAttribute, false, copy, take};
}

// The static graph gives a scalar or a shape as a tensor, where it is computed.
template <class T>
static uint64_t take_number(Kept& kept, phi::KernelContext& context, size_t index) {
  const phi::Attribute& attribute = context.AttrAt(index);
  if (auto* tensor = paddle::get_if<phi::TensorRef>(&attribute)) return keep<T>(kept, T(*tensor->Get()));
  return keep<T>(kept, paddle::get<T>(attribute));
}
static uint64_t take_shape(Kept& kept, phi::KernelContext& context, size_t index) {
  using Tensors = std::vector<phi::TensorRef>;
  if (auto* tensors = paddle::get_if<Tensors>(&context.AttrAt(index)))
    return keep<phi::IntArray>(kept, phi::IntArray(*tensors));
  return take_number<phi::IntArray>(kept, context, index);
}

static Parameter taken_by(Parameter parameter, uint64_t (*take)(Kept&, phi::KernelContext&, size_t)) {
  parameter.take = take;
  return parameter;
}

static const std::map<phi::AttributeType, Parameter>& attributes() {
  using A = phi::AttributeType;
  static const auto* table = new std::map<A, Parameter>{
      {A::BOOL, by_value<bool>()},
      {A::INT32, by_value<int>()},
      {A::INT64, by_value<int64_t>()},
      {A::DATA_LAYOUT, by_value<phi::DataLayout>()},
      {A::DATA_TYPE, by_value<DataType>(Role::kType)},
      {A::FLOAT32, by_value<float>()},
      {A::FLOAT64, by_value<double>()},
      {A::STRING, by_reference<std::string>()},
      {A::SCALAR, taken_by(by_reference<phi::Scalar>(), take_number<phi::Scalar>)},
      {A::INT_ARRAY, taken_by(by_reference<phi::IntArray>(), take_shape)},
      {A::PLACE, by_reference<phi::Place>()},
      {A::BOOLS, by_reference<std::vector<bool>>()},
      {A::INT32S, by_reference<std::vector<int>>()},
      {A::INT64S, by_reference<std::vector<int64_t>>()},
      {A::FLOAT32S, by_reference<std::vector<float>>()},
      {A::FLOAT64S, by_reference<std::vector<double>>()},
      {A::STRINGS, by_reference<std::vector<std::string>>()},
      {A::SCALARS, by_reference<std::vector<phi::Scalar>>()},
  };
  return *table;
}

static const std::map<std::type_index, Role>& tensors() {
  static const auto* table = new std::map<std::type_index, Role>{
      {typeid(const DenseTensor&), Role::kInput},
      {typeid(const optional<DenseTensor>&), Role::kOptionalInput},
      {typeid(const std::vector<const DenseTensor*>&), Role::kInputs},
      {typeid(const std::vector<const phi::TensorBase*>&), Role::kInputs},  // add_n's, of which each is dense
      {typeid(const optional<std::vector<const DenseTensor*>>&), Role::kOptionalInputs},
      {typeid(DenseTensor*), Role::kOutput},
      {typeid(std::vector<DenseTensor*>), Role::kOutputs},
  };
  return *table;
}

// The argument words of one call: what registers hold, and what lies on the stack.
struct Words {
  uint64_t integers[6] = {}, vectors[8] = {};
  std::vector<uint64_t> stack;
};

struct Kernel {
  std::string name;
  void* function;
  DataType type;
  std::vector<Parameter> parameters;
  bool computes_in_float32 = false;  // 16-bit tensors are converted, there and back
  bool is_random = false;            // draws from the generator in the order of the host
  size_t num_stack = 0;

  // Where the words of the parameters are; the first integer register has the context.
  std::vector<uint64_t*> places(Words& words) const {
    std::vector<uint64_t*> result;
    size_t integers = 1, vectors = 0, stack = 0;
    for (const auto& parameter : parameters) {
      if (parameter.in_vector_register)
        result.push_back(vectors < 8 ? &words.vectors[vectors++] : &words.stack[stack++]);
      else
        result.push_back(integers < 6 ? &words.integers[integers++] : &words.stack[stack++]);
    }
    return result;
  }
  size_t stack_words() const {
    size_t vectors = 0;
    for (const auto& parameter : parameters) vectors += parameter.in_vector_register;
    size_t integers = parameters.size() - vectors;
    return (vectors > 8 ? vectors - 8 : 0) + (integers > 5 ? integers - 5 : 0);
  }
};

// False: some parameter is of a kind that the device does not serve.
static bool describe(const phi::Kernel& kernel, std::vector<Parameter>* parameters) {
  for (const auto& input : kernel.args_def().input_defs()) {
    auto found = tensors().find(input.type_index);
    if (found == tensors().end()) return false;
    parameters->push_back({found->second});
  }
  for (const auto& attribute : kernel.args_def().attribute_defs()) {
    auto found = attributes().find(attribute.type_index);
    if (found == attributes().end()) return false;
    parameters->push_back(found->second);
  }
  for (const auto& output : kernel.args_def().output_defs()) {
    auto found = tensors().find(output.type_index);
    if (found == tensors().end()) return false;
    parameters->push_back({found->second});
  }
  return true;
}

// ------------------------------------------------------------------------------------------------------ tensors

static phi::DenseTensorMeta& meta_of(DenseTensor& tensor) { return *phi::DenseTensorUtils::GetMutableMeta(&tensor); }
static bool is_16_bit(DataType type) { return type == DataType::FLOAT16 || type == DataType::BFLOAT16; }
static bool is_on_device(const DenseTensor& tensor) {
  return tensor.initialized() && tensor.place().GetType() == phi::AllocationType::CUSTOM;
}

static std::shared_ptr<phi::Allocation> host_bytes(size_t bytes) {
  auto release = [](phi::Allocation* allocation) { std::free(allocation->ptr()); };
  return std::make_shared<phi::Allocation>(std::aligned_alloc(64, (bytes + 64) / 64 * 64), bytes, release,
                                           phi::CPUPlace());
}

// The same bytes as memory of the CPU. Those of the device are not owned; those of the host are copied, for they
// count as they are at the call.
static DenseTensor as_cpu(const DenseTensor& tensor) {
  DenseTensor result;
  meta_of(result) = tensor.meta();
  if (!tensor.initialized()) return result;
  const auto& holder = tensor.Holder();
  if (is_on_device(tensor)) {
    result.ResetHolder(std::make_shared<phi::Allocation>(holder->ptr(), holder->size(), phi::CPUPlace()));
  } else {
    auto copy = host_bytes(holder->size());
    std::memcpy(copy->ptr(), holder->ptr(), holder->size());
    result.ResetHolder(copy);
  }
  return result;
}

template <class T>
static void widen(const void* from, float* to, size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<float>(static_cast<const T*>(from)[i]);
}
template <class T>
static void narrow(const float* from, void* to, size_t count) {
  for (size_t i = 0; i < count; ++i) static_cast<T*>(to)[i] = static_cast<T>(from[i]);
}

// A float32 tensor of the same shape, with the values of `from`, which is 16-bit memory, or without.
static DenseTensor in_float32(const DenseTensor& like, const void* from) {
  auto meta = like.meta();
  meta.dtype = DataType::FLOAT32;
  meta.offset = 0;
  auto bytes = host_bytes(like.numel() * sizeof(float));
  auto* to = static_cast<float*>(bytes->ptr());
  if (from && like.dtype() == DataType::FLOAT16) widen<float16>(from, to, like.numel());
  if (from && like.dtype() == DataType::BFLOAT16) widen<bfloat16>(from, to, like.numel());
  DenseTensor result;
  result.set_meta(meta);
  result.ResetHolder(bytes);
  return result;
}

// --------------------------------------------------------------------------------------------------------- calls

extern "C" void reference_device_invoke(void* function, const uint64_t* integers, const uint64_t* vectors,
                                        const uint64_t* stack, size_t num_stack);
extern "C" void reference_device_entry();

// The CPU's context with the device's random generators, one for each context of the device.
static phi::CPUContext* cpu_context_of(phi::CustomContext* device) {
  static auto* mutex = new std::mutex;
  static auto* contexts = new std::map<phi::CustomContext*, phi::CPUContext*>;
  std::lock_guard<std::mutex> lock(*mutex);
  auto& context = (*contexts)[device];
  if (context) return context;
  auto* pooled = static_cast<phi::CPUContext*>(phi::DeviceContextPool::Instance().Get(phi::CPUPlace()));
  context = new phi::CPUContext(phi::CPUPlace());
  context->SetAllocator(&pooled->GetAllocator());
  context->SetHostAllocator(&pooled->GetHostAllocator());
  context->SetZeroAllocator(&pooled->GetZeroAllocator());
  context->SetHostZeroAllocator(&pooled->GetHostZeroAllocator());
  try {
    context->SetGenerator(device->GetGenerator());
    context->SetHostGenerator(device->GetHostGenerator());
  } catch (const std::exception&) {
    // The context of a process group has no generators, and runs nothing that draws.
  }
  return context;
}

struct Output {
  DenseTensor* wanted;       // the caller's; not to be touched in the queue
  DenseTensor computed;      // what the CPU kernel writes
  void* memory = nullptr;    // of the device, where the result has to be
  size_t room = 0;           // bytes there
  DataType type;             // of the result
  bool is_converted = false;
  bool has_shape = true;     // known before the kernel runs
};

class Call {
 public:
  Call(const Kernel& kernel, phi::CustomContext* context, const Words& words)
      : kernel_(kernel), context_(context), words_(words) {
    words_.integers[0] = reinterpret_cast<uint64_t>(static_cast<phi::CPUContext*>(cpu_context_of(context)));
    auto places = kernel.places(words_);
    for (size_t i = 0; i < places.size(); ++i) *places[i] = replaced(kernel.parameters[i], *places[i]);
  }

  bool must_wait() const { return kernel_.is_random || !shapes_are_known_; }

  // In the queue, or on the caller's thread after the queue is empty.
  void run() {
    for (auto* input : converted_inputs_) *input = in_float32(*input, input->data());
    for (auto& output : outputs_)
      if (output.is_converted && output.has_shape) output.computed = in_float32(output.computed, output.memory);
    reference_device_invoke(kernel_.function, words_.integers, words_.vectors, words_.stack.data(),
                            words_.stack.size());
    for (auto& output : outputs_)
      if (output.has_shape && output.computed.initialized()) deliver(output);
  }

  // Where only the kernel knew the shapes: allocate now, and write. What was allocated last may still be in use.
  void deliver_unknown(C_Stream stream) {
    for (auto& output : outputs_) {
      if (output.has_shape) continue;
      auto meta = output.computed.meta();
      if (output.computed.initialized()) {
        if (output.is_converted && meta.dtype == DataType::FLOAT32) meta.dtype = output.type;
        meta.offset = 0;
      }
      meta_of(*output.wanted) = meta;
      if (!output.computed.initialized()) continue;
      context_->Alloc(output.wanted, meta.dtype);
      if (output.computed.numel() == 0) continue;
      stream->synchronize();
      output.memory = output.wanted->data();
      output.room = output.wanted->Holder()->size();
      deliver(output);
    }
  }

  const std::string& name() const { return kernel_.name; }

 private:
  // The word that the CPU kernel gets in place of the caller's.
  uint64_t replaced(const Parameter& parameter, uint64_t word) {
    switch (parameter.role) {
      case Role::kInput:
        return reinterpret_cast<uint64_t>(input(reinterpret_cast<const DenseTensor*>(word)));
      case Role::kOptionalInput: {
        const auto& given = *reinterpret_cast<const optional<DenseTensor>*>(word);
        auto copy = std::make_shared<optional<DenseTensor>>();
        if (given) {
          *copy = as_cpu(*given);
          if (given->initialized()) convert_later(&**copy);
        }
        kept_.push_back(copy);
        return reinterpret_cast<uint64_t>(copy.get());
      }
      case Role::kInputs:
        return keep(kept_, inputs(*reinterpret_cast<const std::vector<const DenseTensor*>*>(word)));
      case Role::kOptionalInputs: {
        const auto& given = *reinterpret_cast<const optional<std::vector<const DenseTensor*>>*>(word);
        optional<std::vector<const DenseTensor*>> replaced;
        if (given) replaced = inputs(*given);
        return keep(kept_, replaced);
      }
      case Role::kOutput:
        return reinterpret_cast<uint64_t>(output(reinterpret_cast<DenseTensor*>(word)));
      case Role::kOutputs: {
        std::vector<DenseTensor*> replaced;
        for (auto* given : *reinterpret_cast<std::vector<DenseTensor*>*>(word)) replaced.push_back(output(given));
        return keep(kept_, replaced);
      }
      case Role::kType: {
        bool converts = kernel_.computes_in_float32 && is_16_bit(static_cast<DataType>(word & 0xff));
        return converts ? static_cast<uint64_t>(DataType::FLOAT32) : word;
      }
      case Role::kAttribute:
        return parameter.copy ? parameter.copy(kept_, word) : word;
    }
    return word;
  }

  std::vector<const DenseTensor*> inputs(const std::vector<const DenseTensor*>& given) {
    std::vector<const DenseTensor*> replaced;
    for (auto* one : given) replaced.push_back(input(one));
    return replaced;
  }

  DenseTensor* input(const DenseTensor* given) {
    if (!given) return nullptr;
    inputs_.push_back(as_cpu(*given));
    auto* tensor = &inputs_.back();
    if (!given->initialized() && given->dtype() != DataType::UNDEFINED && given->numel() > 0) {
      // Paddle leaves out the memory of inputs of which a backward kernel needs the shape alone.
      auto bytes = host_bytes(given->numel() * phi::SizeOf(given->dtype()));
      std::memset(bytes->ptr(), 0xFF, bytes->size());
      meta_of(*tensor).offset = 0;
      tensor->ResetHolder(bytes);
    }
    if (tensor->initialized()) convert_later(tensor);
    return tensor;
  }

  void convert_later(DenseTensor* tensor) {
    if (kernel_.computes_in_float32 && is_16_bit(tensor->dtype())) converted_inputs_.push_back(tensor);
  }

  DenseTensor* output(DenseTensor* wanted) {
    if (!wanted) return nullptr;
    outputs_.emplace_back();
    auto& output = outputs_.back();
    output.wanted = wanted;
    output.type = wanted->dtype() == DataType::UNDEFINED ? kernel_.type : wanted->dtype();
    output.is_converted = kernel_.computes_in_float32 && is_16_bit(output.type);
    output.has_shape = wanted->numel() > 0;
    for (int dim = 0; dim < wanted->dims().size(); ++dim) output.has_shape &= wanted->dims()[dim] >= 0;
    if (!output.has_shape) {
      shapes_are_known_ = false;
      meta_of(output.computed) = wanted->meta();
      return &output.computed;
    }
    size_t bytes = wanted->numel() * phi::SizeOf(output.type) + wanted->meta().offset;
    if (!is_on_device(*wanted) || wanted->Holder()->size() < bytes) context_->Alloc(wanted, output.type);
    output.memory = wanted->data();
    output.room = wanted->Holder()->size() - wanted->meta().offset;
    output.computed = as_cpu(*wanted);
    return &output.computed;
  }

  // A kernel may put its result into other memory than it was given.
  void deliver(Output& output) {
    const auto& from = output.computed;
    if (output.is_converted && from.dtype() == DataType::FLOAT32) {
      if (output.type == DataType::FLOAT16) narrow<float16>(from.data<float>(), output.memory, from.numel());
      if (output.type == DataType::BFLOAT16) narrow<bfloat16>(from.data<float>(), output.memory, from.numel());
      return;
    }
    size_t bytes = from.numel() * phi::SizeOf(from.dtype());
    if (bytes == 0 || from.data() == output.memory) return;
    if (bytes > output.room) throw std::runtime_error("its result is larger than its memory");
    std::memcpy(output.memory, from.data(), bytes);
  }

  const Kernel& kernel_;
  phi::CustomContext* context_;
  Words words_;
  Kept kept_;
  std::deque<DenseTensor> inputs_;
  std::deque<Output> outputs_;
  std::vector<DenseTensor*> converted_inputs_;
  bool shapes_are_known_ = true;
};

static void fail_if_wanted() {
  static std::atomic<long> num_kernels{0};
  long which = Options::get().number("FAIL_KERNEL");
  if (which != 0 && ++num_kernels == which) throw std::runtime_error("the device failed, as the test asked for");
}

static void call(const Kernel& kernel, Words& words) {
  auto* context = reinterpret_cast<phi::CustomContext*>(words.integers[0]);
  auto* stream = static_cast<C_Stream>(context->stream());
  Counters::get().add("kernel");
  auto prepared = std::make_shared<Call>(kernel, context, words);
  if (prepared->must_wait()) {
    Counters::get().add(kernel.is_random ? "wait: random" : "wait: shape");
    stream->synchronize();
    prepared->run();
    return prepared->deliver_unknown(stream);
  }
  stream->put_late(Kind::kKernel, [prepared] {
    if (DeviceError::is_set()) return;
    try {
      fail_if_wanted();
      prepared->run();
    } catch (const std::exception& error) {
      DeviceError::keep("kernel " + prepared->name() + ": " + error.what());
    }
  });
}

extern "C" void reference_device_called(const Kernel* kernel, const uint64_t* integers, const uint64_t* vectors,
                                        const uint64_t* stack) {
  Words words;
  std::memcpy(words.integers, integers, sizeof words.integers);
  std::memcpy(words.vectors, vectors, sizeof words.vectors);
  words.stack.assign(stack, stack + kernel->num_stack);
  call(*kernel, words);
}

// The other way to call a kernel (static graph, legacy operators): everything is in a KernelContext.
static void call_with_context(const Kernel& kernel, phi::KernelContext& context) {
  Words words;
  words.stack.resize(kernel.num_stack);
  words.integers[0] = reinterpret_cast<uint64_t>(&context.GetDeviceContext<phi::CustomContext>());
  Kept kept;
  size_t inputs = 0, outputs = 0, attributes = 0;
  auto places = kernel.places(words);
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& parameter = kernel.parameters[i];
    switch (parameter.role) {
      case Role::kInput:
        *places[i] = reinterpret_cast<uint64_t>(&context.InputAt<DenseTensor>(context.InputRangeAt(inputs++).first));
        break;
      case Role::kOptionalInput:
        *places[i] = keep(kept, context.OptionalInputAt<DenseTensor>(context.InputRangeAt(inputs++).first));
        break;
      case Role::kInputs: {
        auto range = context.InputRangeAt(inputs++);
        *places[i] = keep(kept, context.InputsBetween<DenseTensor>(range.first, range.second));
        break;
      }
      case Role::kOptionalInputs: {
        auto range = context.InputRangeAt(inputs++);
        *places[i] = keep(kept, context.OptionalInputsBetween<DenseTensor>(range.first, range.second));
        break;
      }
      case Role::kOutput:
        *places[i] =
            reinterpret_cast<uint64_t>(context.MutableOutputAt<DenseTensor>(context.OutputRangeAt(outputs++).first));
        break;
      case Role::kOutputs: {
        auto range = context.OutputRangeAt(outputs++);
        *places[i] = keep(kept, context.MutableOutputBetween<DenseTensor>(range.first, range.second));
        break;
      }
      default:
        *places[i] = parameter.take(kept, context, attributes++);
    }
  }
  call(kernel, words);
}

// -------------------------------------------------------------------------------------------------- registration

// Machine code: r11 = kernel, jump to the entry.
static void* thunk_of(const Kernel* kernel) {
  static const size_t kSize = 32, kPage = 1 << 20;
  static char *next = nullptr, *end = nullptr;
  if (next == end) {
    next = static_cast<char*>(
        mmap(nullptr, kPage, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (next == MAP_FAILED) throw std::runtime_error("no memory for machine code");
    end = next + kPage;
  }
  auto* code = reinterpret_cast<unsigned char*>(next);
  auto entry = &reference_device_entry;
  const unsigned char load_r11[] = {0x49, 0xBB}, load_rax[] = {0x48, 0xB8}, jump_rax[] = {0xFF, 0xE0};
  std::memcpy(code, load_r11, 2);
  std::memcpy(code + 2, &kernel, 8);
  std::memcpy(code + 10, load_rax, 2);
  std::memcpy(code + 12, &entry, 8);
  std::memcpy(code + 20, jump_rax, 2);
  next += kSize;
  return code;
}

// Rows of zeros for labels out of range: Paddle's cross entropy over tensor-parallel ranks, which it composes for
// plugins' devices, gives each rank the labels of all others too.
static void one_hot(const phi::CPUContext& context, const DenseTensor& labels, const phi::Scalar& num_classes,
                    DenseTensor* out) {
  auto classes = num_classes.to<int64_t>();
  auto* rows = context.Alloc<float>(out);
  std::fill(rows, rows + out->numel(), 0.0f);
  for (int64_t i = 0; i < labels.numel(); ++i) {
    int64_t label = labels.dtype() == DataType::INT64 ? labels.data<int64_t>()[i] : labels.data<int>()[i];
    if (label >= 0 && label < classes) rows[i * classes + label] = 1.0f;
  }
}

// With master weights, which the CPU's kernels of optimizers do not know: update the master, and round it.
using Optional = const optional<DenseTensor>&;
using In = const DenseTensor&;

static decltype(&phi::AdamwDenseKernel<float, phi::CPUContext>) cpu_adamw;
static decltype(&phi::SGDDenseKernel<float, phi::CPUContext>) cpu_sgd;

static void copy(const DenseTensor& from, DenseTensor* to) {
  std::memcpy(to->data<float>(), from.data<float>(), from.numel() * sizeof(float));
}

static void adamw(const phi::CPUContext& context, In param, In grad, In rate, In moment1, In moment2, Optional most,
                  In beta1_pow, In beta2_pow, Optional master, Optional skip, const phi::Scalar& beta1,
                  const phi::Scalar& beta2, const phi::Scalar& epsilon, float ratio, float decay, bool decays,
                  bool lazy, int64_t rows, bool has_master, bool global_pow, bool amsgrad, DenseTensor* param_out,
                  DenseTensor* moment1_out, DenseTensor* moment2_out, DenseTensor* most_out, DenseTensor* beta1_out,
                  DenseTensor* beta2_out, DenseTensor* master_out) {
  cpu_adamw(context, has_master ? *master : param, grad, rate, moment1, moment2, most, beta1_pow, beta2_pow, {}, skip,
            beta1, beta2, epsilon, ratio, decay, decays, lazy, rows, false, global_pow, amsgrad,
            has_master ? master_out : param_out, moment1_out, moment2_out, most_out, beta1_out, beta2_out, nullptr);
  if (has_master) copy(*master_out, param_out);
}

static void sgd(const phi::CPUContext& context, In param, In rate, In grad, Optional master, bool has_master,
                DenseTensor* param_out, DenseTensor* master_out) {
  cpu_sgd(context, has_master ? *master : param, rate, grad, {}, false, has_master ? master_out : param_out, nullptr);
  if (has_master) copy(*master_out, param_out);
}

// What stands for a CPU kernel, or the kernel itself.
static void* function_of(const std::string& name, const phi::Kernel& cpu, bool computes_in_float32) {
  void* function = cpu.GetVariadicKernelFn<void*>();
  if (name == "one_hot") return reinterpret_cast<void*>(one_hot);
  if (name == "adamw" && computes_in_float32) {
    cpu_adamw = reinterpret_cast<decltype(cpu_adamw)>(function);
    return reinterpret_cast<void*>(adamw);
  }
  if (name == "sgd" && computes_in_float32) {
    cpu_sgd = reinterpret_cast<decltype(cpu_sgd)>(function);
    return reinterpret_cast<void*>(sgd);
  }
  return function;
}

static bool contains(const std::string& text, const std::vector<std::string>& words) {
  for (const auto& word : words)
    if (text.find(word) != std::string::npos) return true;
  return false;
}

// What Paddle does for every device itself, what is about files and communication, and tensors of other kinds.
static bool is_left_out(const std::string& name) {
  static const std::set<std::string> names = {
      "shape", "shape64", "is_empty", "nop", "feed", "fetch", "print_kernel", "memcpy", "memcpy_d2h", "memcpy_h2d",
      "memcpy_d2h_multi_io", "load_combine", "save_combine", "share_buffer", "share_data", "coalesce_tensor",
      "barrier", "all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "reduce", "p_send",
      "p_recv", "p_send_array", "p_recv_array", "mp_allreduce_sum", "dist_concat", "global_gather",
      "global_scatter", "empty", "empty_like", "data"};
  return names.count(name) || name.rfind("c_", 0) == 0 || name.rfind("partial_", 0) == 0 || name.rfind("distributed_", 0) == 0 ||
         contains(name, {"array", "coo", "csr", "sparse"});
}

static bool is_random(const std::string& name) {
  return contains(name, {"dropout", "gaussian", "uniform", "randint", "randperm", "bernoulli", "multinomial",
                         "exponential", "poisson", "binomial", "truncated", "dirichlet", "gumbel", "rrelu", "gamma",
                         "shuffle", "nce", "randn", "top_p"});
}

static phi::Kernel made_for_device(const Kernel& kernel, const phi::Kernel& cpu, phi::Backend backend) {
  phi::KernelFn with_context = [&kernel](phi::KernelContext* context) { call_with_context(kernel, *context); };
  phi::Kernel made(with_context, thunk_of(&kernel));
  auto* arguments = made.mutable_args_def();
  *arguments = cpu.args_def();
  for (auto* definitions : {&arguments->input_defs(), &arguments->output_defs()}) {
    for (auto& definition : *definitions) {
      if (definition.backend == phi::Backend::CPU) definition.backend = backend;
      if (kernel.computes_in_float32 && definition.dtype == DataType::FLOAT32) definition.dtype = kernel.type;
    }
  }
  return made;
}

static std::deque<Kernel>& registered() {
  static auto* kernels = new std::deque<Kernel>;
  return *kernels;
}

// The device's kernels of one operator, but for views, which Paddle has for every plugin's device. Where the CPU
// computes in float32 alone, two more that convert.
static void register_operator(const std::string& name, phi::KernelNameMap::mapped_type* kernels,
                              phi::Backend backend) {
  std::vector<std::pair<phi::KernelKey, phi::Kernel>> made;
  auto add = [&](const phi::KernelKey& key, const phi::Kernel& cpu, DataType type, bool computes_in_float32) {
    Kernel kernel;
    if (!describe(cpu, &kernel.parameters)) return;
    kernel.name = name;
    kernel.function = function_of(name, cpu, computes_in_float32);
    kernel.type = type;
    kernel.computes_in_float32 = computes_in_float32;
    kernel.is_random = is_random(name);
    kernel.num_stack = kernel.stack_words();
    registered().push_back(kernel);
    made.emplace_back(phi::KernelKey(backend, key.layout(), type), made_for_device(registered().back(), cpu, backend));
  };
  bool has_16_bits = Options::get().is_on("FLOAT16") || Options::get().is_on("BFLOAT16");
  auto has = [&](phi::Backend whose, phi::DataLayout layout, DataType type) {
    return kernels->count(phi::KernelKey(whose, layout, type)) != 0;
  };
  for (const auto& [key, cpu] : *kernels) {
    bool is_function = cpu.GetKernelRegisteredType() == phi::KernelRegisteredType::FUNCTION;
    if (key.backend() != phi::Backend::CPU || !is_function) continue;
    bool is_view = key.layout() == phi::DataLayout::STRIDED;
    if (is_view && has(phi::Backend::CUSTOM, key.layout(), key.dtype())) continue;
    add(key, cpu, key.dtype(), false);
    if (key.dtype() != DataType::FLOAT32 || !has_16_bits) continue;
    for (auto type : {DataType::FLOAT16, DataType::BFLOAT16}) {
      if (!is_view && !has(phi::Backend::CPU, key.layout(), type)) add(key, cpu, type, true);
    }
  }
  for (auto& [key, kernel] : made)
    if (!kernels->count(key)) (*kernels)[key] = kernel;
}

void register_kernels() {
  auto backend = paddle::experimental::StringToBackend(Options::get().text("NAME", "npu").c_str());
  for (auto& [name, kernels] : phi::KernelFactory::Instance().kernels())
    if (!is_left_out(name)) register_operator(name, &kernels, backend);
}

}  // namespace reference

// ------------------------------------------------------------------------------------------------ sums of gradients

template <class T>
static void axpby(size_t count, float alpha, const void* x, float beta, void* y) {
  auto* from = static_cast<const T*>(x);
  auto* to = static_cast<T*>(y);
  for (size_t i = 0; i < count; ++i)
    to[i] = static_cast<T>(alpha * static_cast<float>(from[i]) + beta * static_cast<float>(to[i]));
}

extern "C" C_Status reference_device_axpby(const C_Device, C_Stream stream, C_DataType type, size_t count, float alpha,
                                           void* x, float beta, void* y) {
  using reference::DeviceError;
  reference::Counters::get().add("kernel");
  stream->put_late(reference::Kind::kKernel, [=] {
    switch (type) {
      case FLOAT32: return axpby<float>(count, alpha, x, beta, y);
      case FLOAT16: return axpby<phi::dtype::float16>(count, alpha, x, beta, y);
      case BFLOAT16: return axpby<phi::dtype::bfloat16>(count, alpha, x, beta, y);
      default: DeviceError::keep("no sum of gradients of type " + std::to_string(type));
    }
  });
  return C_SUCCESS;
}
