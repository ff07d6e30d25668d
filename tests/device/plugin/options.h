// What a test sets in the environment, read once when Paddle loads the plugin. README.md lists all of it.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace reference {

// Where operations are delayed, and may fail or never end.
enum class Kind { kKernel, kCopy, kCollective };

class Options {
 public:
  static Options& get() {
    static auto* options = new Options;  // never destroyed: streams outlive static destructors
    return *options;
  }

  long number(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    return numbers_.at(name);
  }
  bool is_on(const std::string& name) { return number(name) != 0; }
  std::string text(const std::string& name, const std::string& otherwise) const {
    const char* value = std::getenv(("REFERENCE_DEVICE_" + name).c_str());
    return value ? value : otherwise;
  }
  long value_of(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = numbers_.find(name);
    return found == numbers_.end() ? -1 : found->second;
  }
  // Tests change an option while the process runs; false: there is none of that name.
  bool set(const std::string& name, long value) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = numbers_.find(name);
    if (found == numbers_.end()) return false;
    found->second = value;
    return true;
  }

 private:
  Options() {
    numbers_ = {
        {"COUNT", 8},                // devices
        {"MEMORY", 16L << 30},       // bytes of each
        {"SEED", 0},                 // of the delays; 0: each is the longest
        {"KERNEL_DELAY_US", 0},      // longest delay of a kernel,
        {"COPY_DELAY_US", 0},        // of an asynchronous copy,
        {"COLLECTIVE_DELAY_US", 0},  // and of a collective
        {"POISON", 0},               // memory is overwritten when it is used again
        {"ASCEND", 0},               // reductions as in HCCL: no float64, uint8, bool, average
        {"RENDEZVOUS", 0},           // a send ends when its receive has taken the data
        {"LATE_READS", 0},           // a copy from pageable memory reads it when the copy runs
        {"FLOAT16", 1},              // whether kernels in 16 bits are registered
        {"BFLOAT16", 1},
        {"FAIL_KERNEL", 0},          // this kernel, counted from 1, fails on the device
        {"HANG_COLLECTIVE", 0},      // this collective, counted from 1, never ends
        {"TIMEOUT_S", 300},          // then a collective whose peers do not come is an error
    };
    for (auto& [name, value] : numbers_) {
      const char* given = std::getenv(("REFERENCE_DEVICE_" + name).c_str());
      if (given) value = std::strtol(given, nullptr, 10);
    }
  }

  std::mutex mutex_;
  std::map<std::string, long> numbers_;
};

}  // namespace reference
