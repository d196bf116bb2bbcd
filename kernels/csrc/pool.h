// A fixed set of pinned worker threads that run one function together.
//
// Owns the threads. Promises: `run` returns when every worker has; between runs a worker spins briefly, then sleeps.
// Must not know: what is computed. No OpenMP: torch ships its own runtime and two would oversubscribe the cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace quire {

class Pool {
 public:
  // `threads` workers, the caller included. Worker i is pinned to cpus[i] when `cpus` is given; the caller never is.
  Pool(int threads, const int* cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }

  // Calls body(worker) on every worker, the caller being worker 0.
  template <typename Body>
  void run(const Body& body) {
    if (size_ == 1) {
      body(0);
      return;
    }
    start([](const void* closure, int worker) { (*static_cast<const Body*>(closure))(worker); }, &body);
    body(0);
    join();
  }

  // Hands out [0, count) in pieces of `grain` to whoever is free. Reset by the caller of `run` before each use.
  void reset_work() { next_.store(0, std::memory_order_relaxed); }
  bool take(int64_t count, int64_t grain, int64_t* begin, int64_t* end) {
    const int64_t first = next_.fetch_add(grain, std::memory_order_relaxed);
    if (first >= count) return false;
    *begin = first;
    *end = first + grain < count ? first + grain : count;
    return true;
  }

  // All workers of the current `run` wait here for each other.
  void barrier();

 private:
  using Call = void (*)(const void*, int);
  void start(Call call, const void* closure);
  void join();
  void serve(int worker);
  void stop();

  const int size_;
  std::vector<std::thread> threads_;
  Call call_ = nullptr;
  const void* closure_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> pending_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

}  // namespace quire
