#include "gemm/norm.h"

#include <algorithm>
#include <cmath>

#include "weights/linear.h"

namespace quire {
namespace {

inline void store_row(bf16* out, int64_t at, int64_t n, Vec value) {
  if (at + kLanes <= n) return vstore_bf16(out + at, value);
  bf16 lanes[kLanes];
  vstore_bf16(lanes, value);
  std::memcpy(out + at, lanes, static_cast<size_t>(n - at) * sizeof(bf16));
}

inline Vec round_to_bf16(Vec value) {
  bf16 lanes[kLanes];
  vstore_bf16(lanes, value);
  return vload_bf16(lanes);
}

struct Steps {
  float scale, inverse;
};

// The step between codes. A row of zeros has none, and all its codes are 0; one with a NaN or infinity gets NaN.
Steps steps_of(const bf16* x, int64_t n) {
  const float most = to_float(largest_magnitude(x, n));
  const float poison = most * 0.0f;  // the pattern of a NaN is above that of every number
  return {most / 127.0f + poison, most > 0.0f ? 127.0f / most : 0.0f};
}

// Codes of -127..127 whatever the values are: NaN becomes an end of the range.
inline Ints codes(Vec value, float inverse) {
  return to_ints(vmin(vmax(vmul(value, vset(inverse)), vset(-127.0f)), vset(127.0f)));
}

// The sum over a row: add(sum, at) adds what is there from `at` on.
template <typename Add>
inline float row_sum(int64_t n, const Add& add) {
  constexpr int kChains = 4;  // independent sums hide the latency of the addition
  Vec sums[kChains] = {vzero(), vzero(), vzero(), vzero()};
  for (int64_t at = 0; at < n; at += kChains * kLanes) {
    for (int c = 0; c < kChains; ++c) sums[c] = add(sums[c], at + c * kLanes);
  }
  return lane_sum(vadd(vadd(sums[0], sums[1]), vadd(sums[2], sums[3])));
}

inline Vec inverse_root(float squares, int64_t n, float eps) {
  return vset(1.0f / std::sqrt(squares / static_cast<float>(n) + eps));
}

// Sixteen values of a row less its mean, zeros past its end.
inline Vec load_centred(const bf16* x, int64_t at, int64_t n, Vec mean) {
  const Vec moved = vsub(load_row(x, at, n), mean);
  if (at + kLanes <= n) return moved;
  float lanes[kLanes];
  vstore(lanes, moved);
  for (int64_t i = std::max<int64_t>(n - at, 0); i < kLanes; ++i) lanes[i] = 0.0f;
  return vload(lanes);
}

inline Vec load_floats(const float* x, int64_t at, int64_t n) {
  if (at + kLanes <= n) return vload(x + at);
  float lanes[kLanes] = {};
  std::memcpy(lanes, x + at, static_cast<size_t>(n - at) * sizeof(float));
  return vload(lanes);
}

// take(at, value): the normed values from `at` on, before they are rounded to bf16.
template <typename Take>
inline void normed_row(const bf16* x, const Norm& norm, int64_t n, const Take& take) {
  if (norm.centred) {
    const float* weight = static_cast<const float*>(norm.weight);
    const float total = row_sum(n, [&](Vec sum, int64_t at) { return vadd(load_row(x, at, n), sum); });
    const Vec mean = vset(total / static_cast<float>(n));
    const Vec inverse = inverse_root(row_sum(n,
                                             [&](Vec sum, int64_t at) {
                                               const Vec value = load_centred(x, at, n, mean);
                                               return vfma(value, value, sum);
                                             }),
                                     n, norm.eps);
    for (int64_t at = 0; at < n; at += kLanes) {
      take(at, vmul(vmul(load_centred(x, at, n, mean), inverse), load_floats(weight, at, n)));
    }
    return;
  }
  const float squares = row_sum(n, [&](Vec sum, int64_t at) {
    const Vec value = load_row(x, at, n);
    return vfma(value, value, sum);
  });
  const Vec inverse = inverse_root(squares, n, norm.eps);
  if (norm.as_float) {
    const float* weight = static_cast<const float*>(norm.weight);
    for (int64_t at = 0; at < n; at += kLanes) {
      take(at, vmul(vmul(load_row(x, at, n), inverse), load_floats(weight, at, n)));
    }
    return;
  }
  const bf16* weight = static_cast<const bf16*>(norm.weight);
  for (int64_t at = 0; at < n; at += kLanes) {
    const Vec rounded = round_to_bf16(vmul(load_row(x, at, n), inverse));
    take(at, vmul(load_row(weight, at, n), rounded));
  }
}

}  // namespace

void norm_row(const bf16* x, const Norm& norm, int64_t n, bf16* out) {
  normed_row(x, norm, n, [&](int64_t at, Vec value) { store_row(out, at, n, value); });
}

void norm_add_row(const bf16* y, const Norm& norm, int64_t n, float scale, bf16* residual) {
  const Vec factor = vset(scale);
  normed_row(y, norm, n, [&](int64_t at, Vec value) {
    store_row(residual, at, n, vmul(vadd(round_to_bf16(value), load_row(residual, at, n)), factor));
  });
}

void mul_sigmoid_row(const bf16* gate, int64_t n, bf16* x) {
  for (int64_t at = 0; at < n; at += kLanes) {
    store_row(x, at, n, vdiv(load_row(x, at, n), vadd(vset(1.0f), vexp(vsub(vzero(), load_row(gate, at, n))))));
  }
}

float quantize_row_unsigned(const bf16* x, int64_t n, int64_t padded, uint8_t* out) {
  const Steps steps = steps_of(x, n);
  for (int64_t at = 0; at < padded; at += kLanes) {
    store_bytes(out + at, iadd(codes(load_row(x, at, n), steps.inverse), iset(128)));
  }
  return steps.scale;
}

float quantize_row_signed(const bf16* x, int64_t n, int64_t padded, int8_t* out, int32_t* group_sums) {
  static_assert(kGroup == 2 * kLanes, "a group is two vectors");
  const Steps steps = steps_of(x, n);
  for (int64_t at = 0; at < padded; at += kGroup) {
    const Ints low = codes(load_row(x, at, n), steps.inverse);
    const Ints high = codes(load_row(x, at + kLanes, n), steps.inverse);
    store_bytes(out + at, low);
    store_bytes(out + at + kLanes, high);
    group_sums[at / kGroup] = 8 * lane_sum(iadd(low, high));
  }
  return steps.scale;
}

}  // namespace quire
