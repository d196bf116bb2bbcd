// The weights of a panel in slabs, as the tile registers take them (simd/tiles.h): 16 steps, 4 KiB.
//
// Owns what a pass over them fetches, and when coded ones are decoded. Promises: a slab is whole when it is handed out.
// Must not know: activation rows, products.
#pragma once

#include "simd/simd.h"

#if defined(QUIRE_AMX)

#include "simd/prefetch.h"
#include "simd/unroll.h"
#include "weights/coded.h"
#include "weights/linear.h"

namespace quire {

constexpr int64_t kSlabBytes = kTileDepth * kStepBytes;

// What a pass over `count` slabs brings closer while it multiplies: where they are `cold` those that it will come to,
// of `bytes` each from `own` on, and its part of what follows.
class Fetching {
 public:
  Fetching(Cold cold, const char* own, int64_t bytes, int64_t count, const Ahead& ahead)
      : cold_(cold),
        own_(own),
        bytes_(bytes),
        count_(count),
        follows_(ahead.follows),
        brought_from_(ahead.at),
        brought_(ahead.lines > 0 ? ahead.per_step * kTileDepth : 0) {}

  // Inlined for the reason of `prefetch`.
  [[gnu::always_inline]] void with(int64_t slab) const {
    if (cold_ != Cold::kNo) {
      const int64_t next = slab + kDistance;
      const char* at = next < count_ ? own_ + next * bytes_ : follows_ + (next - count_) * bytes_;
      for (int64_t i = 0; i < bytes_; i += 64) prefetch<64>(cold_, at + i);
    }
    const char* at = brought_from_ + slab * brought_;
    for (int64_t i = 0; i < brought_; i += 64) __builtin_prefetch(at + i, 0, 2);
  }

 private:
  static constexpr int64_t kDistance = 3;  // slabs: of coded ones it is the next that is read, not the one in use

  Cold cold_;
  const char* own_;
  int64_t bytes_, count_;
  const char* follows_;
  const char* brought_from_;
  int64_t brought_;  // bytes with every slab
};

// Weights that lie in memory as they are.
class PlainSlabs {
 public:
  PlainSlabs(const char* first, const Fetching& fetching) : first_(first), fetching_(fetching) {}
  const char* at(int64_t slab) {
    fetching_.with(slab);
    return first_ + slab * kSlabBytes;
  }

 private:
  const char* first_;
  Fetching fetching_;
};

// Coded weights, decoded one slab before they are used: into `out`, all `count` of them, or two in turns where no other
// pass wants them.
class DecodedSlabs {
 public:
  DecodedSlabs(const CodedSteps& steps, int64_t count, bool kept, char* out, const Fetching& fetching)
      : steps_(steps), count_(count), kept_(kept), out_(out), fetching_(fetching) {
    decode(0);
  }
  const char* at(int64_t slab) {
    fetching_.with(slab);
    if (slab + 1 < count_) decode(slab + 1);
    return place(slab);
  }

 private:
  char* place(int64_t slab) const { return out_ + (kept_ ? slab : slab % 2) * kSlabBytes; }
  void decode(int64_t slab) {
    char* to = place(slab);
    for (int step = 0; step < kTileDepth; ++step, to += kStepBytes) {
      Pairs weights[kVecs];
      steps_.next(weights);
      unrolled<kVecs>([&](auto v) { pstore(reinterpret_cast<bf16*>(to + v * sizeof(Pairs)), weights[v]); });
    }
  }

  CodedSteps steps_;
  int64_t count_;
  bool kept_;
  char* out_;
  Fetching fetching_;
};

}  // namespace quire

#endif
