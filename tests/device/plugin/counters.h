// How often each thing was done, and for how many bytes.
#pragma once
#include <map>
#include <mutex>
#include <sstream>
#include <string>

namespace reference {

class Counters {
 public:
  static Counters& get() {
    static auto* counters = new Counters;
    return *counters;
  }
  void add(const std::string& what, size_t bytes = 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& entry = entries_[what];
    ++entry.times;
    entry.bytes += bytes;
  }
  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.clear();
  }
  // {"what": [times, bytes], ...}
  std::string json() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::ostringstream text;
    text << "{";
    const char* comma = "";
    for (const auto& [what, entry] : entries_) {
      text << comma << '"' << what << "\": [" << entry.times << ", " << entry.bytes << "]";
      comma = ", ";
    }
    text << "}";
    return text.str();
  }

 private:
  struct Entry {
    long times = 0;
    size_t bytes = 0;
  };
  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
};

}  // namespace reference
