#include "runtime/core_handover.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "runtime/wait.h"

namespace quire {
namespace {

// About 10 us, in which the processor time of a thread that has a core grows.
constexpr int kSpinsToSeeProgress = 800;
constexpr int64_t kIdle = -1;

pid_t own_thread() {
  static thread_local const pid_t thread = static_cast<pid_t>(syscall(SYS_gettid));
  return thread;
}

// Nanoseconds; 0: there is no such thread, or nobody tells.
int64_t processor_time(pid_t thread) {
  // As Linux numbers the clocks of threads: see pthread_getcpuclockid, which needs a thread that is known to live.
  const clockid_t clock = static_cast<clockid_t>((~static_cast<unsigned>(thread) << 3) | 6);
  timespec time;
  if (clock_gettime(clock, &time) != 0) return 0;
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// To `cpu`, where it is queued when this returns; from there on it may run on all of `allowed` again.
void move(pid_t thread, int cpu, const cpu_set_t& allowed) {
  if (!CPU_ISSET(cpu, &allowed)) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  if (sched_setaffinity(thread, sizeof(one), &one) == 0) sched_setaffinity(thread, sizeof(allowed), &allowed);
}

}  // namespace

CoreHandover::CoreHandover(int members, const int* cpus)
    : members_(static_cast<size_t>(members)), before_(static_cast<size_t>(members)) {
  for (size_t i = 1; i < members_.size() && cpus != nullptr; ++i) members_[i].pinned = cpus[i];
  const bool known = sched_getaffinity(0, sizeof(all_), &all_) == 0;
  moves_ = members > 1 && known && CPU_COUNT(&all_) >= members;
}

void CoreHandover::join(int member) {
  Member& own = members_[static_cast<size_t>(member)];
  own.thread.store(own_thread(), std::memory_order_release);
  if (own.pinned >= 0) send_home(own);
}

void CoreHandover::begin() {
  members_[0].thread.store(own_thread(), std::memory_order_relaxed);
  begin(0);
  if (!moves_) return;
  const int here = sched_getcpu();
  if (here == callers_core_.load(std::memory_order_relaxed)) return;
  callers_core_.store(here, std::memory_order_relaxed);
  for (size_t i = 1; i < members_.size(); ++i) {
    if (members_[i].pinned < 0) send_home(members_[i]);
  }
}

// To where a thread computes unless it borrows a core: its own one, or any but the caller's.
void CoreHandover::send_home(const Member& which) const {
  const pid_t thread = which.thread.load(std::memory_order_acquire);
  if (thread == 0) return;  // not yet there
  cpu_set_t home = all_;
  const int callers = callers_core_.load(std::memory_order_relaxed);
  if (which.pinned >= 0) {
    CPU_ZERO(&home);
    CPU_SET(which.pinned, &home);
  } else if (callers >= 0) {
    CPU_CLR(callers, &home);
  }
  sched_setaffinity(thread, sizeof(home), &home);  // refused in some containers: then the system chooses
}

bool CoreHandover::hand_over() {
  if (!moves_) return false;
  if (hands_over_.exchange(true, std::memory_order_acquire)) return false;
  bool sleeps = false;
  const auto thread_of = [this](size_t i) { return members_[i].thread.load(std::memory_order_relaxed); };
  const auto computes = [this](size_t i) { return members_[i].computes.load(std::memory_order_acquire); };
  for (size_t i = 0; i < members_.size(); ++i) before_[i] = computes(i) ? processor_time(thread_of(i)) : kIdle;
  for (int spins = 0; spins < kSpinsToSeeProgress; ++spins) relax();
  for (size_t i = 0; i < members_.size() && !sleeps; ++i) {
    if (before_[i] == kIdle || !computes(i) || processor_time(thread_of(i)) > before_[i]) continue;
    cpu_set_t allowed = all_;
    if (i == 0 && sched_getaffinity(thread_of(i), sizeof(allowed), &allowed) != 0) CPU_ZERO(&allowed);
    if (i != 0) members_[i].borrows.store(true, std::memory_order_relaxed);
    move(thread_of(i), sched_getcpu(), allowed);
    sleeps = true;
  }
  hands_over_.store(false, std::memory_order_release);
  return sleeps;
}

void CoreHandover::give_back(int member) {
  Member& own = members_[static_cast<size_t>(member)];
  if (own.borrows.exchange(false, std::memory_order_relaxed)) send_home(own);
}

}  // namespace quire
