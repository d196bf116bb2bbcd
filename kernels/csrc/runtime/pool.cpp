#include "runtime/pool.h"

#include <sched.h>

#include <algorithm>

namespace quire {
namespace {

// About 50 us: longer than the gap between two ops of a step, shorter than a step.
constexpr int kSpinsBeforeSleep = 4000;
// `presence_`, from above: the run's number, whether workers may still come in, how many came, how many of them left.
constexpr uint64_t kRun = uint64_t{1} << 32, kOpen = kRun >> 1, kCame = uint64_t{1} << 15, kLeft = 1;
constexpr uint32_t run_of(uint64_t presence) { return static_cast<uint32_t>(presence / kRun); }
constexpr int came(uint64_t presence) { return static_cast<int>(presence / kCame & (kCame - 1)); }
constexpr int left(uint64_t presence) { return static_cast<int>(presence & (kCame - 1)); }

// The run goes on without a worker that is late, and has to wait for one that loses its core amid a piece. So none
// takes the core from a thread that the caller has just given work: that one is through before it would be resumed.
void let_others_finish() {
  const sched_param priority{};
  sched_setscheduler(0, SCHED_BATCH, &priority);  // refused in some containers: then as any other thread
}

}  // namespace

Pool::Pool(int threads, const int* cpus)
    : handover_(std::max(threads, 1), cpus),
      first(std::max(threads, 1), &handover_),
      second(std::max(threads, 1), &handover_),
      third(std::max(threads, 1), &handover_),
      size_(std::max(threads, 1)) {
  try {
    for (int worker = 1; worker < size_; ++worker) {
      threads_.emplace_back([this, worker] {
        let_others_finish();
        handover_.join(worker);
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
  stopping_.store(true, std::memory_order_relaxed);  // seen with the epoch
  epoch_.fetch_add(1, std::memory_order_release);
  futex_wake_all(&epoch_);
  for (std::thread& thread : threads_) thread.join();
}

bool Pieces::take(int worker, int64_t count, int64_t grain, Piece* piece) {
  constexpr uint64_t kFront = 1, kBack = uint64_t{1} << 32;
  const int64_t workers = static_cast<int64_t>(shares_.size()), pieces = (count + grain - 1) / grain;
  for (int64_t i = 0; i < workers; ++i) {
    const bool own = i == 0;
    const int64_t whose = (worker + i) % workers;
    const int64_t first = (pieces * whose + workers - 1) / workers;
    const int64_t last = (pieces * (whose + 1) + workers - 1) / workers;
    std::atomic<uint64_t>& share = shares_[static_cast<size_t>(whose)].taken;
    uint64_t taken = share.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t front = static_cast<int64_t>(taken % kBack), back = static_cast<int64_t>(taken / kBack);
      const int64_t left = last - first - front - back;
      if (left <= 0) break;
      if (!share.compare_exchange_weak(taken, taken + (own ? kFront : kBack), std::memory_order_relaxed)) continue;
      const int64_t at = own ? first + front : last - 1 - back;
      *piece = {at * grain, std::min((at + 1) * grain, count), left == 1 ? -1 : (own ? at + 1 : at - 1) * grain};
      return true;
    }
  }
  return false;
}

void Pieces::reset() {
  for (Share& share : shares_) share.taken.store(0, std::memory_order_relaxed);
  finished_.store(0, std::memory_order_relaxed);
}

void Pieces::wait(int worker, int64_t count) const {
  wait_.wait_until([this, count] { return finished_.load(std::memory_order_seq_cst) >= count; }, handover_, worker);
}

void Pool::start(Call call, const void* closure) {
  first.reset();
  second.reset();
  third.reset();
  if (size_ == 1) return;
  call_ = call;
  closure_ = closure;
  handover_.begin();
  const uint32_t run = epoch_.load(std::memory_order_relaxed) + 1;
  presence_.store(run * kRun + kOpen, std::memory_order_release);
  epoch_.store(run, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(&epoch_);
}

// Ends the run when `fewest` workers have come and all who came have left.
void Pool::join(int fewest) {
  if (size_ == 1) return;
  handover_.end(0);
  const auto have_come = [this, fewest] { return came(presence_.load(std::memory_order_seq_cst)) >= fewest; };
  gone_.wait_until(have_come, &handover_, 0);
  presence_.fetch_and(~kOpen, std::memory_order_relaxed);
  const auto have_left = [this] {
    const uint64_t presence = presence_.load(std::memory_order_seq_cst);
    return came(presence) == left(presence);
  };
  gone_.wait_until(have_left, &handover_, 0);
}

// Comes into the run that is open, unless it was in that one before.
bool Pool::enter(uint32_t* seen) {
  uint64_t presence = presence_.load(std::memory_order_relaxed);
  while ((presence & kOpen) != 0 && run_of(presence) != *seen) {
    if (!presence_.compare_exchange_weak(presence, presence + kCame, std::memory_order_acquire)) continue;
    *seen = run_of(presence);
    return true;
  }
  return false;
}

// Leaves the run. Whether the caller slept until then.
bool Pool::leave(int worker) {
  handover_.end(worker);
  presence_.fetch_add(kLeft, std::memory_order_seq_cst);
  return gone_.ring();
}

void Pool::serve(int worker) {
  uint32_t seen = 0;
  bool caller_slept = false;
  for (;;) {
    uint32_t noticed;
    int spins = caller_slept ? kSpinsBeforeSleep : 0;  // it needs a core, perhaps this one
    caller_slept = false;
    while ((noticed = epoch_.load(std::memory_order_acquire)) == seen) {
      if (++spins < kSpinsBeforeSleep) {
        relax();
        continue;
      }
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      while (epoch_.load(std::memory_order_seq_cst) == seen) {
        // A caller that is still at work may have lost its core.
        const bool open = (presence_.load(std::memory_order_relaxed) & kOpen) != 0;
        if (open) handover_.hand_over();
        futex_wait(&epoch_, seen, open ? &kNap : nullptr);
      }
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (enter(&seen)) {
      handover_.begin(worker);
      call_(closure_, worker);
      caller_slept = leave(worker);
      handover_.give_back(worker);
    } else if (static_cast<int32_t>(noticed - seen) > 0) {
      seen = noticed;  // over before this worker was there
    }
  }
}

}  // namespace quire
