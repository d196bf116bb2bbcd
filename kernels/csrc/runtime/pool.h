// A fixed set of worker threads that help the caller with one function at a time.
//
// Owns the threads. Promises: work is dealt in pieces to whoever is there. A worker that the system does not run when a
// function starts is not waited for; one that holds a piece is, and soon leaves it a core to go on. Between runs a
// worker spins briefly, then sleeps. Must not know: what is computed. No OpenMP: torch's runtime and another would
// oversubscribe.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "runtime/wait.h"

namespace quire {

// One piece of a run's work: the numbers [begin, end).
struct Piece {
  int64_t begin, end;
  int64_t next;  // where the worker's next piece begins unless another is sooner; -1: not known
};

// The numbers [0, count), dealt in pieces. Every worker has a share of its own, which it takes from the front, so that
// it walks through memory in order and asks nobody; one that is through helps the others from the back of theirs.
// Workers that must not pass before all is done say what they finished.
class Pieces {
 public:
  Pieces(int workers, CoreHandover* handover) : shares_(static_cast<size_t>(workers)), handover_(handover) {}

  int64_t workers() const { return static_cast<int64_t>(shares_.size()); }
  // The worker's next `grain` numbers, or fewer at the end, or false. All calls of a run have the same count and grain.
  bool take(int worker, int64_t count, int64_t grain, Piece* piece);
  void finish(int64_t number) {
    finished_.fetch_add(number, std::memory_order_seq_cst);
    wait_.ring();
  }
  // From a worker: returns when `count` numbers are finished; what their workers wrote can then be read.
  void wait(int worker, int64_t count) const;

 private:
  friend class Pool;
  void reset();

  // How many pieces of a share are taken, from the front (lower half) and from the back (upper half).
  struct alignas(64) Share {
    std::atomic<uint64_t> taken{0};
  };
  std::vector<Share> shares_;
  CoreHandover* const handover_;
  alignas(64) std::atomic<int64_t> finished_{0};
  Wait wait_;
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
  // So body must do what is left to do, in pieces of `first`, `second` or `third`, which start anew with each run.
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

 private:
  CoreHandover handover_;

 public:
  Pieces first, second, third;

 private:
  using Call = void (*)(const void*, int);
  template <typename Body>
  static void invoke(const void* closure, int worker) {
    (*static_cast<const Body*>(closure))(worker);
  }
  void start(Call call, const void* closure);
  void join(int fewest);
  bool enter(uint32_t* seen);
  bool leave(int worker);
  void serve(int worker);
  void stop();

  const int size_;
  std::vector<std::thread> threads_;
  Call call_ = nullptr;
  const void* closure_ = nullptr;
  std::atomic<bool> stopping_{false};              // a worker that comes late to a run may look while the pool ends
  alignas(64) std::atomic<uint32_t> epoch_{0};     // counts runs; what workers watch and sleep on
  alignas(64) std::atomic<uint64_t> presence_{0};  // of workers in the run: see pool.cpp
  alignas(64) std::atomic<int> sleepers_{0};
  Wait gone_;  // of workers that leave
};

}  // namespace quire
