// How a thread waits for what others do: it spins while they compute, and sleeps to hand over its core to one that
// cannot.
//
// Promises: what changed before `ring` is seen. Must not know: what is waited for.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "runtime/core_handover.h"

namespace quire {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Short: who is waited for may lose its core again.
constexpr timespec kNap{0, 100'000};

// Until `word` has another value and its waiters are woken, or `most` is over; null: however long it takes.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t value, const timespec* most = nullptr) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, value, most, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

class Wait {
 public:
  // Returns when ready(), which reads with memory_order_seq_cst what is written so before `ring`. `member`: who waits.
  template <typename Ready>
  void wait_until(const Ready& ready, CoreHandover* handover, int member) const {
    for (int spins = 0;; ++spins) {
      if (ready()) return;
      if (spins < kSpinsBeforeLook) {
        relax();
      } else if (!handover->moves()) {
        sched_yield();
      } else if (handover->hand_over()) {
        break;
      } else {
        spins = 0;
      }
    }
    const bool computed = handover->end(member);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    for (;;) {
      const uint32_t rings = rings_.load(std::memory_order_seq_cst);
      if (ready()) break;
      futex_wait(&rings_, rings, &kNap);
      handover->hand_over();
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    if (computed) handover->begin(member);
  }

  // Whether anybody slept.
  bool ring() {
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return false;
    rings_.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&rings_);
    return true;
  }

 private:
  // About 50 us: longer than a piece of a decode step.
  static constexpr int kSpinsBeforeLook = 4000;

  alignas(64) mutable std::atomic<uint32_t> rings_{0};
  mutable std::atomic<int> sleepers_{0};
};

}  // namespace quire
