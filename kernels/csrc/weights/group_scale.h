// The scales of int4 weights: one byte for each group of 32, relative to a power of two for the row.
//
// Promises: of the scales that are tried for a group, the one with the least squared error. Must not know: panels.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd/simd.h"
#include "weights/linear.h"
#include "weights/scale.h"

namespace quire {

// Sixteen scales are tried for a group, one per lane: they map its extreme value to -8 and less or more. The first one,
// exactly -8, is the usual choice.
constexpr float kExtremes[kLanes] = {-8.0f, -7.8f, -7.6f, -7.4f, -7.2f, -7.0f, -6.8f, -6.5f,
                                     -8.2f, -8.4f, -8.6f, -8.8f, -9.0f, -9.3f, -9.6f, -10.0f};

inline Vec nibbles(Vec value, Vec inverse) { return vmin(vmax(vround(vmul(value, inverse)), vset(-8.0f)), vset(7.0f)); }

// The code of the scale with the least squared error for 32 finite values, of which the largest is below 13.
inline uint8_t best_scale(const float* x) {
  float extreme = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  }
  float tried[kLanes];
  vstore(tried, vdiv(vset(extreme), vload(kExtremes)));
  uint8_t codes[kLanes];
  for (int i = 0; i < kLanes; ++i) codes[i] = scale_code(tried[i]);
  const Vec scale = vload_scales(codes);
  const Vec inverse = vdiv(vset(1.0f), scale);
  Vec error = vzero();
  for (int i = 0; i < kGroup; ++i) {
    const Vec value = vset(x[i]);
    const Vec miss = vsub(value, vmul(nibbles(value, inverse), scale));
    error = vfma(miss, miss, error);
  }
  float errors[kLanes];
  vstore(errors, error);
  int best = 0;
  for (int i = 1; i < kLanes; ++i) {
    if (errors[i] < errors[best]) best = i;
  }
  return codes[best];
}

// The power of two that a row's scales are relative to: the largest that is tried for it is then between 1 and 2. NaN
// for a row that is not finite.
inline float row_unit(const bf16* row, int64_t columns) {
  constexpr float kMost = 1.0f / 6.5f;  // of the extreme value
  constexpr float kLeast = 1e-35f;      // the inverse of its unit is a number
  const float largest = to_float(largest_magnitude(row, columns));
  if (!std::isfinite(largest)) return std::nanf("");
  return std::ldexp(1.0f, std::ilogb(std::max(largest, kLeast) * kMost));
}

}  // namespace quire
