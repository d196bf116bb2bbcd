// The activations of a gate-up pair: the one list from which their epilogues, their products and the names that Python
// compares with its own follow, and a function of vectors for each.
//
// Promises: a line of the list without a function does not compile. Must not know: products, rows.
#pragma once

#include "simd/simd.h"

// each(member of Epilogue, name in Python, function), in the order of `Activation` there.
// clang-format off
#define QUIRE_ACTIVATIONS(each)         \
  each(kSiluMul, "silu", silu_mul)      \
  each(kGeluMul, "gelu_tanh", gelu_mul) \
  each(kSwigluMul, "swiglu_clamped", swiglu)
// clang-format on

namespace quire {

// x * sigmoid(x) times up. Below -1e4 that is 0, though e^-x as computed has an end. NaN stays NaN, see vexp.
inline Vec silu_mul(Vec x, Vec up) {
  const Vec bounded = vmax(vset(-1e4f), x);
  return vmul(vdiv(bounded, vadd(vset(1.0f), vexp(vsub(vzero(), bounded)))), up);
}

// x (1 + tanh(z)) / 2 times up with z = sqrt(2 / pi) (x + 0.044715 x^3), which is x * sigmoid(2 z) * up.
inline Vec gelu_mul(Vec x, Vec up) {
  const Vec bounded = vmax(vset(-1e4f), x);
  const Vec cubic = vmul(vmul(bounded, bounded), bounded);
  const Vec twice = vmul(vset(1.5957691216f), vfma(vset(0.044715f), cubic, bounded));
  return vmul(vdiv(bounded, vadd(vset(1.0f), vexp(vsub(vzero(), twice)))), up);
}

// gpt-oss's: g * sigmoid(1.702 g) * (u + 1), g at most 7 and u within -7..7. NaN stays NaN, see vexp.
inline Vec swiglu(Vec gate, Vec up) {
  const Vec bounded = vmax(vset(-1e4f), vmin(vset(7.0f), gate));
  const Vec grown = vexp(vmul(vset(-1.702f), bounded));
  const Vec factor = vadd(vmax(vset(-7.0f), vmin(vset(7.0f), up)), vset(1.0f));
  return vmul(vdiv(bounded, vadd(vset(1.0f), grown)), factor);
}

}  // namespace quire
