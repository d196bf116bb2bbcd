// What int8 attention and the write of an int8 pool share: the largest magnitude of a row, and bounds.
//
// Promises: a row alone, in one order. Must not know: the pool, steps.
#pragma once

#include "simd/simd.h"

namespace quire {

constexpr float kNothing = 1e-30f;  // a largest magnitude below this counts as 0, so that its inverse is finite

struct Largest {
  float value;
  float nan;  // 0; NaN where some number is NaN or infinite
};

// `load(x + i)` is the vector at i; d is a multiple of 16.
template <typename T, typename Load>
inline Largest largest_of(const T* x, int64_t d, const Load& load) {
  Vec most = vzero(), nan = vzero();
  for (int64_t i = 0; i < d; i += kLanes) {
    const Vec v = load(x + i);
    most = vmax(vmax(v, vsub(vzero(), v)), most);
    nan = vfma(v, vzero(), nan);
  }
  return {lane_max(most), lane_sum(nan)};
}

// Within -limit..limit; a NaN becomes -limit.
inline Vec bounded(Vec x, float limit) { return vmax(vmin(x, vset(limit)), vset(-limit)); }

}  // namespace quire
