#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace quire {
namespace {

// About 50 us: longer than the gap between two ops of a step, shorter than a step.
constexpr int kSpinsBeforeSleep = 4000;
// A peer that was descheduled by another process gets the core back sooner when waiters yield.
constexpr int kSpinsBeforeYield = 2000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof(set), &set);  // refused in some containers: then it runs unpinned
}

template <typename Ready>
void spin_until(const Ready& ready) {
  for (int spins = 0; !ready(); ++spins) {
    if (spins < kSpinsBeforeYield) {
      relax();
    } else {
      sched_yield();
    }
  }
}

}  // namespace

Pool::Pool(int threads, const int* cpus) : size_(threads < 1 ? 1 : threads) {
  try {
    for (int worker = 1; worker < size_; ++worker) {
      const int cpu = cpus != nullptr ? cpus[worker] : -1;
      threads_.emplace_back([this, worker, cpu] {
        if (cpu >= 0) pin(cpu);
        serve(worker);
      });
    }
  } catch (...) {  // the system gives no more threads
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stopping_ = true;
  epoch_.fetch_add(1, std::memory_order_release);
  futex_wake_all(&epoch_);
  for (std::thread& thread : threads_) thread.join();
}

void Pool::start(Call call, const void* closure) {
  call_ = call;
  closure_ = closure;
  pending_.store(size_ - 1, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(&epoch_);
}

void Pool::join() {
  spin_until([this] { return pending_.load(std::memory_order_acquire) == 0; });
}

void Pool::barrier() {
  if (size_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  spin_until([this, phase] { return phase_.load(std::memory_order_acquire) != phase; });
}

void Pool::serve(int worker) {
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpinsBeforeSleep) {
        relax();
        continue;
      }
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      while (epoch_.load(std::memory_order_seq_cst) == seen) futex_wait(&epoch_, seen);
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
    ++seen;
    if (stopping_) return;
    call_(closure_, worker);
    pending_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace quire
