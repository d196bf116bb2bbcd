// Sixteen float lanes, whatever the machine has: one AVX-512 register, two AVX2 registers, or a plain array.
//
// Promises: every operation treats each lane alone and in the same order on every call, so that a result never depends
// on its neighbours. The plain array is the specification of the others. Must not know: matrices, attention.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define QUIRE_AVX512 1
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#define QUIRE_AVX2 1
#include "simd_avx2.h"
#else
#include "simd_arrays.h"
#endif

namespace quire {

inline float lane_sum(Vec a) {
  float lanes[kLanes];
  vstore(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

inline int32_t lane_sum(Ints a) {
  int32_t lanes[kLanes];
  istore(lanes, a);
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

// The low byte of each lane.
inline void store_bytes(void* p, Ints a) {
#if defined(QUIRE_AVX512)
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
#else
  int32_t lanes[kLanes];
  istore(lanes, a);
  uint8_t bytes[kLanes];
  for (int i = 0; i < kLanes; ++i) bytes[i] = static_cast<uint8_t>(lanes[i]);
  std::memcpy(p, bytes, sizeof(bytes));
#endif
}

inline float lane_max(Vec a) {
#if defined(QUIRE_AVX512)
  return _mm512_reduce_max_ps(a.v);
#else
  float lanes[kLanes];
  vstore(lanes, a);
  float best = lanes[0];
  for (int i = 1; i < kLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
#endif
}

// e^x, with x cut to -87.3..88. Cody-Waite reduction and a degree-6 polynomial (Cephes expf), error < 2 ulp.
inline Vec vexp(Vec x) {
  // The constant comes first: min and max then hand on a NaN in x instead of hiding it.
  const Vec clipped = vmax(vset(-87.3f), vmin(vset(88.0f), x));
  const Vec n = vround(vmul(clipped, vset(1.44269504088896341f)));
  Vec r = vfma(n, vset(-0.693359375f), clipped);
  r = vfma(n, vset(2.12194440e-4f), r);
  Vec p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  p = vfma(vmul(r, r), p, vadd(r, vset(1.0f)));
  return vscale2(p, n);
}

// x * sigmoid(x). Below -1e4 that is 0, though e^-x as computed has an end. NaN stays NaN, see vexp.
inline Vec vsilu(Vec x) {
  const Vec bounded = vmax(vset(-1e4f), x);
  return vdiv(bounded, vadd(vset(1.0f), vexp(vsub(vzero(), bounded))));
}

}  // namespace quire
