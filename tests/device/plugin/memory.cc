#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "options.h"
#include "stream.h"

namespace reference {

static const size_t kAlignment = 256;  // of cudaMalloc and aclrtMalloc
static const int kPoison = 0xFF;       // NaN in all floats, -1 in integers

class Memory {
 public:
  static Memory& get() {
    static auto* memory = new Memory;
    return *memory;
  }

  void* allocate(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (figures_.used + bytes > static_cast<size_t>(Options::get().number("MEMORY"))) return nullptr;
    void* pointer = take_freed(bytes);
    if (!pointer) {
      if (posix_memalign(&pointer, kAlignment, std::max(bytes, kAlignment))) return nullptr;
      if (Options::get().is_on("POISON")) std::memset(pointer, kPoison, bytes);
    }
    sizes_[pointer] = bytes;
    figures_.used += bytes;
    figures_.peak = std::max(figures_.peak, figures_.used);
    return pointer;
  }

  bool deallocate(void* pointer) {
    bool keeps = Options::get().is_on("POISON");
    if (!keeps)  // as cudaFree: everything that is queued may still use it
      for (auto& stream : C_Stream_st::all()) stream->synchronize();
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = sizes_.find(pointer);
    if (found == sizes_.end()) return false;
    size_t bytes = found->second;
    figures_.used -= bytes;
    sizes_.erase(found);
    if (keeps)
      freed_[bytes].push_back(pointer);
    else
      std::free(pointer);
    return true;
  }

  MemoryFigures figures() {
    std::lock_guard<std::mutex> lock(mutex_);
    return figures_;
  }
  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    figures_.peak = figures_.used;
  }

 private:
  // What was freed last is given out first, and overwritten in the order of the compute stream, as its new owner
  // would do it: another stream that still uses it without having said so finds the poison. Where the compute stream
  // is idle, that is at once: the new owner may be another stream, which need not wait for one with nothing to do.
  void* take_freed(size_t bytes) {
    auto& blocks = freed_[bytes];
    if (blocks.empty()) return nullptr;
    void* pointer = blocks.back();
    blocks.pop_back();
    auto streams = C_Stream_st::all();
    auto overwrite = [pointer, bytes] { std::memset(pointer, kPoison, bytes); };
    if (streams.empty() || streams.front()->is_idle())
      overwrite();
    else
      streams.front()->put(overwrite);
    return pointer;
  }

  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;
  std::map<size_t, std::vector<void*>> freed_;
  MemoryFigures figures_{0, 0};
};

void* allocate(size_t bytes) { return Memory::get().allocate(bytes); }
bool deallocate(void* pointer) { return Memory::get().deallocate(pointer); }
MemoryFigures memory_figures() { return Memory::get().figures(); }
void reset_peak() { Memory::get().reset_peak(); }

}  // namespace reference
