// Streams and events. A stream is a thread that runs what was put into its queue, late where the options say so.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "options.h"
#include "paddle/phi/backends/device_ext.h"

namespace reference {

// The first error of the device stays, as on hardware: whoever waits for the device afterwards gets it.
class DeviceError {
 public:
  static void keep(const std::string& what);
  static bool is_set();
  static C_Status status() { return is_set() ? C_FAILED : C_SUCCESS; }
};

// How far a record has come. Paddle destroys events whose waits are still queued, so the queue shares this.
class EventState {
 public:
  long record() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ++recorded_;
  }
  void reach(long number) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (number > reached_) reached_ = number;
    changed_.notify_all();
  }
  long newest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }
  void wait_for(long number) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached_ >= number; });
  }
  bool is_reached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_ >= recorded_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  long recorded_ = 0, reached_ = 0;
};

}  // namespace reference

struct C_Event_st {
  std::shared_ptr<reference::EventState> state = std::make_shared<reference::EventState>();
};

struct C_Stream_st {
 public:
  C_Stream_st();
  // Queue work; it runs after what was queued before.
  void put(std::function<void()> work);
  // The same, after a delay that depends on the seed, this stream and how many operations it had.
  void put_late(reference::Kind kind, std::function<void()> work);
  // Wait for everything that is queued now.
  void synchronize();
  bool is_idle();
  // The thread ends when the queue is empty; nobody waits for it, because an operation may never end.
  void close();

  static std::vector<std::shared_ptr<C_Stream_st>> all();
  static C_Stream_st* create();
  static void destroy(C_Stream_st* stream);

 private:
  static void run(std::shared_ptr<C_Stream_st> stream);

  std::mutex mutex_;
  std::condition_variable queued_, finished_;
  std::deque<std::function<void()>> queue_;
  bool is_closed_ = false;
  long num_queued_ = 0, num_finished_ = 0, num_late_ = 0;
  int id_;
};
