// How the loops over packed weights fetch what they will load.
//
// Promises: nothing but speed depends on any of it. Must not know: what the bytes mean.
#pragma once

#include <cstdint>
#include <type_traits>

namespace quire {

// Loads run ahead by about the latency of memory at the rate one core can read.
constexpr int64_t kPrefetchBytes = 4096;

// Where memory that is read once is fetched to. Which is faster depends on the processor's maker, so the caller of the
// library says it (quire_kernels/cpu/context.py).
enum class Fetch : int32_t {
  kPastCaches = 0,  // by the non-temporal hint: the caches keep what the rest of the machine works with
  kSecondLevel = 1  // not through the few buffers for lines that the first-level cache waits for
};

// Whether a tile's weights are still in memory: then it fetches what it will load, and the start of what follows.
enum class Cold {
  kNo,
  kShared,  // other tiles follow
  // No other tile meets them.
  kPastCaches,
  kSecondLevel
};

// Of weights that one tile or one decoding reads.
constexpr Cold read_once(Fetch fetch) { return fetch == Fetch::kSecondLevel ? Cold::kSecondLevel : Cold::kPastCaches; }

// Of weights that are read in so many passes, the first of which finds them in the cache if they are `fetched`.
constexpr Cold first_of(int64_t passes, bool fetched, Fetch fetch) {
  if (fetched) return Cold::kNo;
  return passes == 1 ? read_once(fetch) : Cold::kShared;
}

// Inlined always: gcc takes a function that only prefetches for one without effects, and leaves out its calls.
template <int64_t kBytes, int kLocality = 3>
[[gnu::always_inline]] inline void prefetch(const void* p) {
  for (int64_t at = 0; at < kBytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at, 0, kLocality);
}

template <int64_t kBytes>
[[gnu::always_inline]] inline void prefetch(Cold cold, const void* p) {
  switch (cold) {
    case Cold::kNo: return;
    case Cold::kShared: return prefetch<kBytes>(p);
    case Cold::kPastCaches: return prefetch<kBytes, 0>(p);
    case Cold::kSecondLevel: return prefetch<kBytes, 2>(p);
  }
}

// A line well ahead of its use, which is not of weights: by default to the first-level cache.
template <bool kToSecond>
[[gnu::always_inline]] inline void prefetch_line(const void* p) {
  __builtin_prefetch(p, 0, kToSecond ? 2 : 3);
}

// Calls f with whether `fetch` is kSecondLevel as a compile-time constant.
template <typename F>
inline void with_fetch(Fetch fetch, const F& f) {
  if (fetch == Fetch::kSecondLevel) return f(std::true_type{});
  f(std::false_type{});
}

// Lines of memory that lie in several places.
struct Beside {
  const char* const* lines;  // [count]
  int64_t count;
};

// The weights that come after those of a tile: they travel from memory to the second-level cache while it computes,
// so that waiting for memory and computing take place at the same time.
struct Ahead {
  const char* follows;  // what comes after the tile: the last steps of cold weights fetch its first kPrefetchBytes
  const char* at;       // what every step fetches a part of
  int64_t per_step;     // bytes; for int4 per group
  int64_t lines;        // of 64 bytes, covering per_step; 0: nothing
  Beside beside{};      // of these one with every step
};

}  // namespace quire
