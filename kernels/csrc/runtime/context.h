// What the ops of one engine share: the worker pool and memory that is reused from call to call.
//
// Owns both. Promises: one op runs at a time (concurrent callers wait); no exception leaves an exported function.
// Must not know: what an op computes.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#include "runtime/commit.h"
#include "runtime/pool.h"
#include "runtime/ranks.h"
#include "simd/prefetch.h"

namespace quire {

// Memory that only grows, aligned for vectors. Growing forgets what it held.
class Scratch {
 public:
  Scratch() = default;
  Scratch(Scratch&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // Throws std::bad_alloc: call it before the workers start.
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    std::free(data_);
    size_ = 0;
    const size_t alignment = bytes < kLarge ? kAlignment : kHugePage;
    const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    data_ = static_cast<char*>(std::aligned_alloc(alignment, rounded));
    if (data_ == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (alignment == kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);  // refused: small pages
#endif
    size_ = rounded;
  }
  char* data() const { return data_; }

  static constexpr size_t kAlignment = 64, kHugePage = 2 << 20, kLarge = kHugePage / 8;

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

struct Context {
  Context(int threads, const int* cpus) : pool(threads, cpus), own(static_cast<size_t>(pool.size())) {}

  // Memory of each worker for the op that runs.
  void reserve_own(size_t bytes) {
    for (Scratch& scratch : own) scratch.reserve(bytes);
  }

  Pool pool;
  std::mutex busy;
  Scratch shared;             // of the op that runs, for all workers
  Scratch between;            // rows on their way from one op to the next
  Scratch experts, products;  // of a block of experts: its rows, and what its products multiply
  Scratch adapted;            // what adapters make of the rows of the product that follows
  std::vector<Scratch> own;
  Committer committer;               // of the KV pool
  Ranks ranks;                       // that divide every product
  Fetch fetch = Fetch::kPastCaches;  // of what an op reads once
};

// Runs an op's body alone on the context; the exported function's result.
template <typename Body>
int32_t guarded(Context* context, const Body& body) {
  try {
    const std::lock_guard<std::mutex> lock(context->busy);
    body();
    return 0;
  } catch (const RankLost&) {
    return kRankLost;
  } catch (...) {  // only memory can run out
    return 1;
  }
}

// Rounded up so that what follows in the same scratch stays aligned.
constexpr int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace quire
