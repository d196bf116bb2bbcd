// A thread that waits hands over its core to the one it waits for, where that has lost its own to another process.
//
// Where there are more threads than cores, the system runs those of one core in turns of milliseconds and moves none of
// them while no core is idle. So it is done from here: workers keep off the caller's core, and one that holds up the
// others is brought to the core of a thread that waits, until it is through.
// Owns the affinity of the pool's own threads, and what its threads know of each other. Promises: the caller's affinity
// stays as it was; where the system refuses any of this, or there are fewer cores than threads, nothing happens. Must
// not know: what is computed.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace quire {

class CoreHandover {
 public:
  // Member 0 is whoever calls; the others are the pool's own threads, pinned to cpus[member] if `cpus` is given.
  CoreHandover(int members, const int* cpus);

  // Whether threads are moved at all.
  bool moves() const { return moves_; }

  // From one of the pool's own threads, before it does anything else.
  void join(int member);
  // From the caller, before it wakes anybody: it computes from here on, and the others elsewhere.
  void begin();
  void begin(int member) { computes(member).store(true, std::memory_order_release); }
  // Of the calling thread: it computes no longer. Whether it did.
  bool end(int member) { return computes(member).exchange(false, std::memory_order_relaxed); }

  // From a thread that waits: brings one that computes and has no core to this one. Whether there was one, which gets
  // the core when the calling thread sleeps.
  bool hand_over();
  // From one of the pool's own threads that computes no longer: leaves the core that it was lent.
  void give_back(int member);

 private:
  struct alignas(64) Member {
    std::atomic<bool> computes{false}, borrows{false};
    std::atomic<pid_t> thread{0};
    int pinned = -1;
  };
  std::atomic<bool>& computes(int member) { return members_[static_cast<size_t>(member)].computes; }
  void send_home(const Member& which) const;

  std::vector<Member> members_;
  std::vector<int64_t> before_;          // of whoever hands over: the members' processor times
  std::atomic<bool> hands_over_{false};  // one at a time
  std::atomic<int> callers_core_{-1};    // off which the others keep
  cpu_set_t all_;
  bool moves_ = false;
};

}  // namespace quire
