// The device as Paddle sees it: the functions of its plugin interface, paddle/phi/backends/device_ext.h.
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "collectives.h"
#include "counters.h"
#include "kernels.h"
#include "memory.h"
#include "options.h"
#include "stream.h"

namespace reference {

static C_Status counted(const char* what, size_t bytes = 0) {
  Counters::get().add(what, bytes);
  return C_SUCCESS;
}

// --------------------------------------------------------------------------------------------------- devices

static thread_local int current_device = 0;

static C_Status initialize() { return C_SUCCESS; }

// At the end of the process: the counters, where a test asks for them.
static C_Status finalize() {
  auto path = Options::get().text("REPORT", "");
  if (!path.empty()) std::ofstream(path + "." + std::to_string(getpid())) << Counters::get().json() << "\n";
  return C_SUCCESS;
}

static C_Status initialize_device(const C_Device) { return C_SUCCESS; }
static C_Status release_device(const C_Device) { return C_SUCCESS; }
static C_Status set_device(const C_Device device) {
  current_device = device->id;
  return C_SUCCESS;
}
static C_Status get_device(const C_Device device) {
  device->id = current_device;
  return C_SUCCESS;
}
static C_Status device_count(size_t* count) {
  *count = Options::get().number("COUNT");
  return C_SUCCESS;
}
static C_Status device_list(size_t* ids) {
  for (long id = 0; id < Options::get().number("COUNT"); ++id) ids[id] = id;
  return C_SUCCESS;
}
static C_Status capability(const C_Device, size_t* value) {
  *value = 80;
  return C_SUCCESS;
}
static C_Status version(const C_Device, size_t* value) {
  *value = 1;
  return C_SUCCESS;
}
static C_Status computes_float16(const C_Device, bool* answer) {
  *answer = Options::get().is_on("FLOAT16");
  return C_SUCCESS;
}
static C_Status computes_bfloat16(const C_Device, bool* answer) {
  *answer = Options::get().is_on("BFLOAT16");
  return C_SUCCESS;
}

// ---------------------------------------------------------------------------------------- streams and events

static C_Status create_stream(const C_Device, C_Stream* stream) {
  *stream = C_Stream_st::create();
  return counted("stream");
}
static C_Status destroy_stream(const C_Device, C_Stream stream) {
  C_Stream_st::destroy(stream);
  return C_SUCCESS;
}
static C_Status query_stream(const C_Device, C_Stream stream) { return stream->is_idle() ? C_SUCCESS : C_FAILED; }
static C_Status synchronize_stream(const C_Device, C_Stream stream) {
  Counters::get().add("wait: stream");
  if (stream) stream->synchronize();
  return DeviceError::status();
}
static C_Status synchronize_device(const C_Device) {
  Counters::get().add("wait: device");
  for (auto& stream : C_Stream_st::all()) stream->synchronize();
  return DeviceError::status();
}
static C_Status add_callback(const C_Device device, C_Stream stream, C_Callback callback, void* data) {
  C_Device_st copy = *device;
  stream->put([=]() mutable {
    C_Status status = C_SUCCESS;
    callback(&copy, stream, data, &status);
  });
  return C_SUCCESS;
}
static C_Status create_event(const C_Device, C_Event* event) {
  *event = new C_Event_st;
  return C_SUCCESS;
}
static C_Status destroy_event(const C_Device, C_Event event) {
  delete event;
  return C_SUCCESS;
}
static C_Status record_event(const C_Device, C_Stream stream, C_Event event) {
  auto state = event->state;
  long number = state->record();
  stream->put([state, number] { state->reach(number); });
  return counted("event");
}
static C_Status query_event(const C_Device, C_Event event) { return event->state->is_reached() ? C_SUCCESS : C_FAILED; }
static C_Status synchronize_event(const C_Device, C_Event event) {
  Counters::get().add("wait: event");
  event->state->wait_for(event->state->newest());
  return DeviceError::status();
}
// The wait is for the record that is newest now, not for later ones.
static C_Status stream_wait_event(const C_Device, C_Stream stream, C_Event event) {
  auto state = event->state;
  long number = state->newest();
  stream->put([state, number] { state->wait_for(number); });
  return C_SUCCESS;
}

// ------------------------------------------------------------------------------------------ memory and copies

static C_Status allocate_memory(const C_Device, void** pointer, size_t bytes) {
  // No memory is a null pointer and success: any error status would not be taken for a lack of memory.
  *pointer = allocate(bytes);
  return counted(*pointer ? "allocate" : "out of memory", bytes);
}
static C_Status free_memory(const C_Device, void* pointer, size_t) { return deallocate(pointer) ? C_SUCCESS : C_ERROR; }
static C_Status set_memory(const C_Device, void* pointer, unsigned char value, size_t bytes) {
  std::memset(pointer, value, bytes);
  return C_SUCCESS;
}
static C_Status memory_figures_of(const C_Device, size_t* total, size_t* left) {
  *total = Options::get().number("MEMORY");
  *left = *total - memory_figures().used;
  return C_SUCCESS;
}
static C_Status least_chunk(const C_Device, size_t* bytes) {
  *bytes = 256;
  return C_SUCCESS;
}
static C_Status allocate_host(const C_Device, void** pointer, size_t bytes) {
  *pointer = std::malloc(bytes);
  return *pointer ? counted("allocate: host", bytes) : C_FAILED;
}
static C_Status free_host(const C_Device, void* pointer, size_t) {
  std::free(pointer);
  return C_SUCCESS;
}

static C_Status copied(const char* what, void* to, const void* from, size_t bytes) {
  Counters::get().add(what, bytes);
  std::memcpy(to, from, bytes);
  return DeviceError::status();
}
static C_Status copy_h2d(const C_Device, void* to, const void* from, size_t bytes) {
  return copied("blocking copy: to device", to, from, bytes);
}
static C_Status copy_d2h(const C_Device, void* to, const void* from, size_t bytes) {
  return copied("blocking copy: to host", to, from, bytes);
}
static C_Status copy_d2d(const C_Device, void* to, const void* from, size_t bytes) {
  return copied("blocking copy: on device", to, from, bytes);
}
static C_Status copy_p2p(const C_Device, const C_Device, void* to, const void* from, size_t bytes) {
  return copied("blocking copy: between devices", to, from, bytes);
}

static C_Status copy_late(const char* what, C_Stream stream, void* to, const void* from, size_t bytes) {
  stream->put_late(Kind::kCopy, [=] { std::memcpy(to, from, bytes); });
  return counted(what, bytes);
}
// As on hardware, pageable memory is read before the call returns, and written before it returns.
static C_Status copy_h2d_late(const C_Device, C_Stream stream, void* to, const void* from, size_t bytes) {
  if (Options::get().is_on("LATE_READS")) return copy_late("copy: to device", stream, to, from, bytes);
  auto* start = static_cast<const char*>(from);
  auto staged = std::make_shared<std::vector<char>>(start, start + bytes);
  stream->put_late(Kind::kCopy, [=] { std::memcpy(to, staged->data(), bytes); });
  return counted("copy: to device", bytes);
}
static C_Status copy_d2h_late(const C_Device, C_Stream stream, void* to, const void* from, size_t bytes) {
  copy_late("copy: to host", stream, to, from, bytes);
  if (!Options::get().is_on("LATE_READS")) stream->synchronize();
  return DeviceError::status();
}
static C_Status copy_d2d_late(const C_Device, C_Stream stream, void* to, const void* from, size_t bytes) {
  return copy_late("copy: on device", stream, to, from, bytes);
}
static C_Status copy_p2p_late(const C_Device, const C_Device, C_Stream stream, void* to, const void* from,
                              size_t bytes) {
  return copy_late("copy: between devices", stream, to, from, bytes);
}

// Paddle's profiler wants a tracer of the device; this one has nothing to tell but the counters.
static C_Status make_tracer(C_Profiler, void** data) {
  *data = nullptr;
  return C_SUCCESS;
}
static C_Status trace_nothing(C_Profiler, void*) { return C_SUCCESS; }
static C_Status collect_nothing(C_Profiler, uint64_t, void*) { return C_SUCCESS; }

static void fill(C_DeviceInterface* interface) {
  size_t size = interface->size;  // Paddle's, which is checked
  std::memset(static_cast<void*>(interface), 0, sizeof *interface);
  interface->size = size;

  interface->initialize = initialize;
  interface->finalize = finalize;
  interface->init_device = initialize_device;
  interface->deinit_device = release_device;
  interface->set_device = set_device;
  interface->get_device = get_device;
  interface->get_device_count = device_count;
  interface->get_device_list = device_list;
  interface->get_compute_capability = capability;
  interface->get_runtime_version = version;
  interface->get_driver_version = version;
  interface->is_float16_supported = computes_float16;
  interface->is_bfloat16_supported = computes_bfloat16;

  interface->create_stream = create_stream;
  interface->destroy_stream = destroy_stream;
  interface->query_stream = query_stream;
  interface->synchronize_stream = synchronize_stream;
  interface->synchronize_device = synchronize_device;
  interface->stream_add_callback = add_callback;
  interface->create_event = create_event;
  interface->destroy_event = destroy_event;
  interface->record_event = record_event;
  interface->query_event = query_event;
  interface->synchronize_event = synchronize_event;
  interface->stream_wait_event = stream_wait_event;

  interface->device_memory_allocate = allocate_memory;
  interface->device_memory_deallocate = free_memory;
  interface->device_memory_set = set_memory;
  interface->device_memory_stats = memory_figures_of;
  interface->device_min_chunk_size = least_chunk;
  interface->host_memory_allocate = allocate_host;
  interface->host_memory_deallocate = free_host;
  interface->unified_memory_allocate = allocate_host;
  interface->unified_memory_deallocate = free_host;
  interface->memory_copy_h2d = copy_h2d;
  interface->memory_copy_d2h = copy_d2h;
  interface->memory_copy_d2d = copy_d2d;
  interface->memory_copy_p2p = copy_p2p;
  interface->async_memory_copy_h2d = copy_h2d_late;
  interface->async_memory_copy_d2h = copy_d2h_late;
  interface->async_memory_copy_d2d = copy_d2d_late;
  interface->async_memory_copy_p2p = copy_p2p_late;

  interface->profiler_initialize = make_tracer;
  interface->profiler_finalize = trace_nothing;
  interface->profiler_prepare_tracing = trace_nothing;
  interface->profiler_start_tracing = trace_nothing;
  interface->profiler_stop_tracing = trace_nothing;
  interface->profiler_collect_trace_data = collect_nothing;

  fill_collectives(interface);
}

}  // namespace reference

// Paddle adds up gradients with it: y = alpha x + beta y.
extern "C" C_Status reference_device_axpby(const C_Device, C_Stream, C_DataType, size_t, float, void*, float, void*);

extern "C" void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  static std::string name = reference::Options::get().text("NAME", "npu");
  static char kind[] = "reference";
  params->device_type = name.data();
  params->sub_device_type = kind;
  reference::fill(params->interface);
  params->interface->blas_axpby = reference_device_axpby;
  reference::register_kernels();
}

// ------------------------------------------------------------------------------------------------- for tests

extern "C" {
// The counters as JSON; valid until the next call of this thread.
const char* reference_device_counters() {
  static thread_local std::string text;
  text = reference::Counters::get().json();
  return text.c_str();
}
void reference_device_clear_counters() { reference::Counters::get().clear(); }
// -1: there is no such option.
long reference_device_option(const char* option) { return reference::Options::get().value_of(option); }
// 0: there is no such option.
int reference_device_set(const char* option, long value) { return reference::Options::get().set(option, value); }
size_t reference_device_peak() { return reference::memory_figures().peak; }
size_t reference_device_used() { return reference::memory_figures().used; }
void reference_device_reset_peak() { reference::reset_peak(); }
}
