// A fixed set of worker threads that help the caller with one function at a time.
//
// Owns the threads. Promises: work is dealt in pieces to whoever is there. A worker that the system does not run when a
// function starts is not waited for; one that holds a piece is. Between runs a worker spins briefly, then sleeps.
// Must not know: what is computed. No OpenMP: torch ships its own runtime and two would oversubscribe the cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace quire {

// The numbers [0, count), dealt in pieces. Workers that must not pass before all is done say what they finished.
class Pieces {
 public:
  // The next `grain` numbers [*begin, *end), or false.
  bool take(int64_t count, int64_t grain, int64_t* begin, int64_t* end) {
    const int64_t first = next_.fetch_add(grain, std::memory_order_relaxed);
    if (first >= count) return false;
    *begin = first;
    *end = first + grain < count ? first + grain : count;
    return true;
  }
  void finish(int64_t number) { finished_.fetch_add(number, std::memory_order_release); }
  // Returns when `count` numbers are finished; what their workers wrote can then be read.
  void wait(int64_t count) const;

 private:
  friend class Pool;
  void reset();

  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> finished_{0};
};

class Pool {
 public:
  // `threads` workers, the caller included. Worker i is pinned to cpus[i] when `cpus` is given; the caller never is.
  Pool(int threads, const int* cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }

  // Calls body(worker) on the caller, which is worker 0, and on every worker that comes before the caller is through.
  // So body must do what is left to do, in pieces of `first` or `second`, which start anew with each run.
  template <typename Body>
  void run(const Body& body) {
    start(&invoke<Body>, &body);
    body(0);
    join(0);
  }

  // Calls body(worker) once on every worker, however long that takes to begin.
  template <typename Body>
  void run_on_all(const Body& body) {
    start(&invoke<Body>, &body);
    body(0);
    join(size_ - 1);
  }

  Pieces first, second;

 private:
  using Call = void (*)(const void*, int);
  template <typename Body>
  static void invoke(const void* closure, int worker) {
    (*static_cast<const Body*>(closure))(worker);
  }
  void start(Call call, const void* closure);
  void join(int fewest);
  bool enter(uint32_t* seen);
  void serve(int worker);
  void stop();

  const int size_;
  std::vector<std::thread> threads_;
  Call call_ = nullptr;
  const void* closure_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<uint32_t> epoch_{0};     // counts runs; what workers watch and sleep on
  alignas(64) std::atomic<uint64_t> presence_{0};  // of workers in the run: see pool.cpp
  alignas(64) std::atomic<int> sleepers_{0};
};

}  // namespace quire
