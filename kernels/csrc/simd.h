// Sixteen float lanes, whatever the machine has: one AVX-512 register, two AVX2 registers, or a plain array.
//
// Promises: every operation treats each lane alone and in the same order on every call, so that a result never depends
// on its neighbours. The plain array is the specification of the others. Must not know: matrices, attention.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace quire {

using bf16 = uint16_t;
constexpr int kLanes = 16;

inline float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define QUIRE_AVX512 1

struct Vec {
  __m512 v;
};
// 16 pairs of bf16: lane i holds elements 2i and 2i + 1.
struct Pairs {
  __m512i v;
};

inline Vec vzero() { return {_mm512_setzero_ps()}; }
inline Vec vset(float x) { return {_mm512_set1_ps(x)}; }
inline Vec vload(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void vstore(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec vadd(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec vsub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec vmul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec vdiv(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec vfma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
inline Vec vmax(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec vmin(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec vround(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for integral n in [-126, 127].
inline Vec vscale2(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline Vec vload_bf16(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline void vstore_bf16(bf16* p, Vec a) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh(a.v);
  std::memcpy(p, &half, 32);
#else
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
#endif
}
inline Pairs pload(const bf16* p) { return {_mm512_loadu_si512(p)}; }
inline Pairs pset(const bf16* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, 4);
  return {_mm512_set1_epi32(bits)};
}
// acc + w[2i] * a[2i] + w[2i + 1] * a[2i + 1], lane by lane.
inline Vec dot2(Vec acc, Pairs w, Pairs a) {
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)a.v)};
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 w0 = _mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16));
  const __m512 a0 = _mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16));
  const __m512 w1 = _mm512_castsi512_ps(_mm512_and_si512(w.v, high));
  const __m512 a1 = _mm512_castsi512_ps(_mm512_and_si512(a.v, high));
  return {_mm512_fmadd_ps(w1, a1, _mm512_fmadd_ps(w0, a0, acc.v))};
#endif
}

// Sixteen 32-bit integer sums, and sixteen quads of bytes.
struct Ints {
  __m512i v;
};
inline Ints izero() { return {_mm512_setzero_si512()}; }
inline Ints iload(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void istore(void* p, Ints a) { _mm512_storeu_si512(p, a.v); }
inline Ints iset(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints iadd(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints isub(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Vec to_vec(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints to_ints(Vec a) { return {_mm512_cvtps_epi32(a.v)}; }  // ties to even
inline Ints low_nibbles(Ints a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Ints high_nibbles(Ints a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// acc + the four products u * s of each lane: u unsigned bytes, s signed bytes.
inline Ints dot4(Ints acc, Ints u, Ints s) {
#if defined(__AVX512VNNI__)
  // Not the intrinsic: gcc 12 copies and spills accumulators around it, which halves the speed of a large tile.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(u.v), "v"(s.v));
  return acc;
#else
  // 16-bit products: the byte form (maddubs) would saturate.
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(u.v, _mm512_set1_epi16(255)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(s.v, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u.v, 8), _mm512_srai_epi16(s.v, 8));
  return {_mm512_add_epi32(acc.v, _mm512_add_epi32(even, odd))};
#endif
}

#elif defined(__AVX2__) && defined(__FMA__)
#define QUIRE_AVX2 1

struct Vec {
  __m256 lo, hi;
};
struct Pairs {
  __m256i lo, hi;
};

inline Vec vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void vstore(float* p, Vec a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline Vec vadd(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec vsub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec vmul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec vdiv(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec vfma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Vec vmax(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec vmin(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec vround(Vec a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 scale2(__m256 a, __m256 n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
}
inline Vec vscale2(Vec a, Vec n) { return {scale2(a.lo, n.lo), scale2(a.hi, n.hi)}; }
inline __m256 widen(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Vec vload_bf16(const bf16* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void vstore_bf16(bf16* p, Vec a) {
  float lanes[kLanes];
  vstore(lanes, a);
  for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(lanes[i]);
}
inline Pairs pload(const bf16* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
inline Pairs pset(const bf16* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, 4);
  return {_mm256_set1_epi32(bits), _mm256_set1_epi32(bits)};
}
inline __m256 dot2(__m256 acc, __m256i w, __m256i a) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256 even =
      _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w, high)),
                         _mm256_castsi256_ps(_mm256_and_si256(a, high)), even);
}
inline Vec dot2(Vec acc, Pairs w, Pairs a) { return {dot2(acc.lo, w.lo, a.lo), dot2(acc.hi, w.hi, a.hi)}; }

struct Ints {
  __m256i lo, hi;
};
inline Ints izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Ints iload(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void istore(void* p, Ints a) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, a.lo);
  _mm256_storeu_si256(q + 1, a.hi);
}
inline Ints iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints iadd(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Ints isub(Ints a, Ints b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline Vec to_vec(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Ints to_ints(Vec a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }  // ties to even
inline Ints low_nibbles(Ints a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline Ints high_nibbles(Ints a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(a.lo, 4), mask), _mm256_and_si256(_mm256_srli_epi16(a.hi, 4), mask)};
}
inline __m256i dot4(__m256i acc, __m256i u, __m256i s) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
inline Ints dot4(Ints acc, Ints u, Ints s) { return {dot4(acc.lo, u.lo, s.lo), dot4(acc.hi, u.hi, s.hi)}; }

#else

struct Vec {
  float v[kLanes];
};
struct Pairs {
  bf16 v[2 * kLanes];
};

template <typename F>
inline Vec each(const F& f) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
  return r;
}
inline Vec vzero() { return each([](int) { return 0.0f; }); }
inline Vec vset(float x) { return each([=](int) { return x; }); }
inline Vec vload(const float* p) { return each([=](int i) { return p[i]; }); }
inline void vstore(float* p, Vec a) { std::memcpy(p, a.v, sizeof(a.v)); }
inline Vec vadd(Vec a, Vec b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline Vec vsub(Vec a, Vec b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline Vec vmul(Vec a, Vec b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline Vec vdiv(Vec a, Vec b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline Vec vfma(Vec a, Vec b, Vec c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline Vec vmax(Vec a, Vec b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline Vec vmin(Vec a, Vec b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline Vec vround(Vec a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
inline Vec vscale2(Vec a, Vec n) {
  return each([&](int i) { return n.v[i] == n.v[i] ? std::ldexp(a.v[i], static_cast<int>(n.v[i])) : n.v[i]; });
}
inline Vec vload_bf16(const bf16* p) { return each([=](int i) { return to_float(p[i]); }); }
inline void vstore_bf16(bf16* p, Vec a) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(a.v[i]);
}
inline Pairs pload(const bf16* p) {
  Pairs r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
inline Pairs pset(const bf16* pair) {
  Pairs r;
  for (int i = 0; i < 2 * kLanes; ++i) r.v[i] = pair[i & 1];
  return r;
}
inline Vec dot2(Vec acc, Pairs w, Pairs a) {
  return each([&](int i) {
    const float even = to_float(w.v[2 * i]) * to_float(a.v[2 * i]) + acc.v[i];
    return to_float(w.v[2 * i + 1]) * to_float(a.v[2 * i + 1]) + even;
  });
}

struct Ints {
  int32_t v[kLanes];
};
template <typename F>
inline Ints each_int(const F& f) {
  Ints r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
  return r;
}
inline Ints izero() { return each_int([](int) { return 0; }); }
inline Ints iload(const void* p) {
  Ints r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
inline void istore(void* p, Ints a) { std::memcpy(p, a.v, sizeof(a.v)); }
inline Ints iset(int32_t x) { return each_int([=](int) { return x; }); }
inline Ints iadd(Ints a, Ints b) { return each_int([&](int i) { return a.v[i] + b.v[i]; }); }
inline Ints isub(Ints a, Ints b) { return each_int([&](int i) { return a.v[i] - b.v[i]; }); }
inline Vec to_vec(Ints a) { return each([&](int i) { return static_cast<float>(a.v[i]); }); }
inline Ints to_ints(Vec a) {  // ties to even
  return each_int([&](int i) { return static_cast<int32_t>(std::nearbyint(a.v[i])); });
}
inline Ints low_nibbles(Ints a) { return each_int([&](int i) { return a.v[i] & 0x0f0f0f0f; }); }
inline Ints high_nibbles(Ints a) {
  return each_int([&](int i) { return static_cast<int32_t>((static_cast<uint32_t>(a.v[i]) >> 4) & 0x0f0f0f0fu); });
}
inline Ints dot4(Ints acc, Ints u, Ints s) {
  return each_int([&](int i) {
    uint8_t x[4];
    int8_t y[4];
    std::memcpy(x, &u.v[i], 4);
    std::memcpy(y, &s.v[i], 4);
    return acc.v[i] + x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
  });
}

#endif

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
