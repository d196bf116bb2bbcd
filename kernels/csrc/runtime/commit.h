// Pages of a large mapping, committed before their use: a first write can cost milliseconds, in the middle of a step.
//
// Owns the thread. Promises: it runs only where a core has nothing else to do, changes no byte, and survives that the
// mapping is gone. Must not know: what the memory is for.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace quire {

class Committer {
 public:
  Committer() = default;
  ~Committer() { stop(); }
  Committer(const Committer&) = delete;
  Committer& operator=(const Committer&) = delete;

  // Begins with the pages of [data, data + bytes), in order. What was begun before is given up.
  // Throws std::system_error where there is no thread to be had.
  void start(char* data, int64_t bytes);

 private:
  void stop();

  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace quire
