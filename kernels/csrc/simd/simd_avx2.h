// The lanes of simd.h as two AVX2 registers.
//
// Promises: the results of simd_portable.h, but for the rounding of fused products. Must not know: matrices, attention.
#pragma once

#include <immintrin.h>

#include "simd/bf16.h"
#include "weights/scale.h"

namespace quire {

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
inline Vec vfma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
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
// The low halves of 32 bits as the bf16 that they are.
inline __m256 widened(__m256i low) { return _mm256_castsi256_ps(_mm256_slli_epi32(low, 16)); }
inline Vec vload_bf16(const bf16* p) {
  const auto* halves = reinterpret_cast<const __m128i*>(p);
  return {widened(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves))),
          widened(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1)))};
}
// Eight bf16 in the low halves of 32 bits, as to_bf16 rounds them.
inline __m256i narrow(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a), cut = _mm256_srli_epi32(bits, 16);
  const __m256i half = _mm256_add_epi32(_mm256_and_si256(cut, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(cut, _mm256_set1_epi32(0x40)), nan);
}
// The low halves of sixteen 32-bit lanes, which are below 2^16.
inline __m256i packed(__m256i lo, __m256i hi) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8); }
inline void vstore_bf16(bf16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed(narrow(a.lo), narrow(a.hi)));
}
inline Vec vload_scales(const uint8_t* p) {
  const auto half = [p](int at) {
    const __m256i bits = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + at)));
    const __m256i told = _mm256_set1_epi32(static_cast<int>(kScaleBits));
    const __m256i kept = _mm256_and_si256(_mm256_slli_epi32(bits, kScaleShift), told);
    return _mm256_castsi256_ps(_mm256_or_si256(kept, _mm256_set1_epi32(kScaleLeast)));
  };
  return {half(0), half(8)};
}
// Sixteen fp16, all finite, and sixteen signed bytes. Not through F16C, which these instruction sets do not imply.
inline Vec vload_half(const uint16_t* p) {
  const auto half = [p](int at) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + at)));
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fff));
    // Those below the normal ones are multiples of 2^-24.
    const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-24f));
    const __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 13), _mm256_set1_epi32((127 - 15) << 23));
    const __m256 is_small = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(0x400), magnitude));
    const __m256 value = _mm256_blendv_ps(_mm256_castsi256_ps(normal), small, is_small);
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(bits, 15), 31);
    return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
  };
  return {half(0), half(8)};
}
inline Vec vload_bytes(const int8_t* p) {
  const auto half = [p](int at) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + at))));
  };
  return {half(0), half(8)};
}
inline Pairs pload(const bf16* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
inline void pstore(bf16* p, Pairs a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), a.hi);
}
#define QUIRE_PAIRS_IN_PARTS 1  // see simd.h
// a rounded to bf16.
inline Vec vrounded(Vec a) { return {widened(narrow(a.lo)), widened(narrow(a.hi))}; }
template <int kPart>
inline Vec pair_part(Pairs a) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const auto half = [&](__m256i x) { return kPart == 0 ? widened(x) : _mm256_castsi256_ps(_mm256_and_si256(x, high)); };
  return {half(a.lo), half(a.hi)};
}
// x is the same in all lanes. Not the intrinsic: gcc 12 writes sums over the factors and then copies and spills.
inline Vec pair_product(Vec acc, Vec w, Vec x) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.lo) : "x"(w.lo), "x"(x.lo));
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc.hi) : "x"(w.hi), "x"(x.lo));
  return acc;
}

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
// acc + the four products u * s of each lane: u unsigned bytes, s signed bytes.
inline __m256i dot4(__m256i acc, __m256i u, __m256i s) {
#if defined(__AVXVNNI__)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(u), "x"(s));  // not the intrinsic: see pair_product
  return acc;
#else
  const __m256i even =
      _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
#endif
}
inline Ints dot4(Ints acc, Ints u, Ints s) { return {dot4(acc.lo, u.lo, s.lo), dot4(acc.hi, u.hi, s.hi)}; }

#if !defined(__AVXVNNI__)
#define QUIRE_QUADS_IN_PARTS 1  // see simd.h
template <int kPart>
inline Ints quad_part(Ints a) {
  const auto half = [](__m256i x) { return _mm256_srai_epi16(kPart == 0 ? _mm256_slli_epi16(x, 8) : x, 8); };
  return {half(a.lo), half(a.hi)};
}
inline Ints quad_product(Ints acc, Ints w, Ints x) {  // x and the intrinsics: see pair_product
  __m256i both;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc.lo), "=&x"(both) : "x"(w.lo), "x"(x.lo));
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc.hi), "=&x"(both) : "x"(w.hi), "x"(x.lo));
  return acc;
}

inline Ints nibble_dot(Ints acc, Ints u, Ints s) {
  return {_mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(u.lo, s.lo)),
          _mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(u.hi, s.hi))};
}
inline Ints nibble_total(Ints acc, int32_t offset) {
  const __m256i ones = _mm256_set1_epi16(1);
  return isub({_mm256_madd_epi16(acc.lo, ones), _mm256_madd_epi16(acc.hi, ones)}, iset(offset));
}
#endif

}  // namespace quire
