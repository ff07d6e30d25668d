#include "stream.h"

#include <algorithm>
#include <cstdio>

#include "counters.h"

namespace reference {

static std::mutex& error_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
static std::string& error_text() {
  static auto* text = new std::string;
  return *text;
}

void DeviceError::keep(const std::string& what) {
  std::lock_guard<std::mutex> lock(error_mutex());
  if (!error_text().empty()) return;
  error_text() = what;
  std::fprintf(stderr, "[reference device] %s\n", what.c_str());
}

bool DeviceError::is_set() {
  std::lock_guard<std::mutex> lock(error_mutex());
  return !error_text().empty();
}

static uint64_t mixed(uint64_t x) {  // the finalizer of splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

static long delay_us(Kind kind, int stream, long number) {
  auto& options = Options::get();
  const char* name = kind == Kind::kKernel ? "KERNEL_DELAY_US" : kind == Kind::kCopy ? "COPY_DELAY_US" : "COLLECTIVE_DELAY_US";
  long longest = options.number(name), seed = options.number("SEED");
  if (longest <= 0 || seed == 0) return std::max(longest, 0L);
  return mixed(mixed(mixed(seed) ^ stream) ^ number) % (longest + 1);
}

static std::mutex& list_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
static std::vector<std::shared_ptr<C_Stream_st>>& list() {
  static auto* streams = new std::vector<std::shared_ptr<C_Stream_st>>;
  return *streams;
}

}  // namespace reference

using reference::Counters;

C_Stream_st::C_Stream_st() {
  static std::atomic<int> count{0};
  id_ = count++;
}

C_Stream_st* C_Stream_st::create() {
  auto stream = std::make_shared<C_Stream_st>();
  std::thread(run, stream).detach();
  std::lock_guard<std::mutex> lock(reference::list_mutex());
  reference::list().push_back(stream);
  return stream.get();
}

void C_Stream_st::destroy(C_Stream_st* stream) {
  std::lock_guard<std::mutex> lock(reference::list_mutex());
  auto& list = reference::list();
  auto found = std::find_if(list.begin(), list.end(), [&](auto& one) { return one.get() == stream; });
  if (found == list.end()) return;
  (*found)->close();
  list.erase(found);
}

std::vector<std::shared_ptr<C_Stream_st>> C_Stream_st::all() {
  std::lock_guard<std::mutex> lock(reference::list_mutex());
  return reference::list();
}

void C_Stream_st::run(std::shared_ptr<C_Stream_st> stream) {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(stream->mutex_);
      stream->queued_.wait(lock, [&] { return stream->is_closed_ || !stream->queue_.empty(); });
      if (stream->queue_.empty()) return;
      work = std::move(stream->queue_.front());
      stream->queue_.pop_front();
    }
    work();
    work = nullptr;  // what it holds is let go before it counts as finished
    std::lock_guard<std::mutex> lock(stream->mutex_);
    ++stream->num_finished_;
    stream->finished_.notify_all();
  }
}

void C_Stream_st::put(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  ++num_queued_;
  queued_.notify_one();
}

void C_Stream_st::put_late(reference::Kind kind, std::function<void()> work) {
  long delay;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    delay = reference::delay_us(kind, id_, num_late_++);
  }
  if (delay == 0) return put(std::move(work));
  put([delay, work = std::move(work)] {
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
    work();
  });
}

void C_Stream_st::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  long upto = num_queued_;
  finished_.wait(lock, [&] { return num_finished_ >= upto; });
}

bool C_Stream_st::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_finished_ == num_queued_;
}

void C_Stream_st::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  queued_.notify_all();
}
