// How the loops over packed weights fetch what they will load.
//
// Promises: nothing but speed depends on any of it. Must not know: what the bytes mean.
#pragma once

#include <cstdint>

namespace quire {

// Loads run ahead by about the latency of memory at the rate one core can read.
constexpr int64_t kPrefetchBytes = 4096;

// Whether a tile's weights are still in memory: then it fetches what it will load, and the start of what follows.
enum class Cold {
  kNo,
  kOnce,   // no other tile meets them: fetched past the caches, which then keep what the rest of the machine works with
  kShared  // other tiles follow
};

template <int64_t kBytes, bool kOnce = false>
inline void prefetch(const void* p) {
  for (int64_t at = 0; at < kBytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at, 0, kOnce ? 0 : 3);
}

template <int64_t kBytes>
inline void prefetch(Cold cold, const void* p) {
  if (cold == Cold::kOnce) prefetch<kBytes, true>(p);
  if (cold == Cold::kShared) prefetch<kBytes>(p);
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
