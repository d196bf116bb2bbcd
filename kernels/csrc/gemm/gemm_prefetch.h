// What the passes over one panel fetch of the panel that follows.
//
// Promises: nothing but speed depends on it. Must not know: kinds of weights, products.
#pragma once

#include <cstdint>

#include "simd/prefetch.h"

namespace quire {

// Many passes bring all of it. Of few the first waits for its own panel, whose loads are then the best prefetch, and
// the others bring what they have time for.
class Prefetcher {
 public:
  // `step_bytes`: of the weights that a pass meets in one turn of its loop; `few_bytes` of them for each of few passes.
  // `beside`: what else the panel that follows needs, a part of it with every pass.
  Prefetcher(int64_t passes, int64_t step_bytes, int64_t few_bytes, const Beside& beside = {})
      : all(passes > 3),
        passes_(passes),
        first_(all ? 0 : 1),
        per_step_(all ? step_bytes / passes : few_bytes),
        beside_(beside) {}

  // For `count` turns of a pass, `after` them; nothing when the worker's panels end here.
  Ahead of(int64_t pass, int64_t count, const char* after, bool ends) const {
    const int64_t lines = !ends && pass >= first_ ? (per_step_ + 63) / 64 : 0;
    const int64_t begin = beside_.count * pass / passes_, end = beside_.count * (pass + 1) / passes_;
    return {after, after + (pass - first_) * count * per_step_, per_step_, lines, {beside_.lines + begin, end - begin}};
  }

  const bool all;

 private:
  const int64_t passes_, first_, per_step_;
  const Beside beside_;
};

}  // namespace quire
