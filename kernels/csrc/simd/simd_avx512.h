// The lanes of simd.h as one AVX-512 register; bf16 and byte products where the CPU has instructions for them.
//
// Promises: the results of simd_portable.h, but for the rounding of fused products. Must not know: matrices, attention.
#pragma once

#include <immintrin.h>

#include "simd/bf16.h"
#include "weights/scale.h"

namespace quire {

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
inline Vec widened(__m256i half) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))}; }
inline Vec vload_bf16(const bf16* p) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// Sixteen bf16.
#if defined(__AVX512BF16__)
inline __m256i narrow(Vec a) { return (__m256i)_mm512_cvtneps_pbh(a.v); }
#else
inline __m256i narrow(Vec a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(rounded);
}
#endif
inline void vstore_bf16(bf16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
inline Vec vload_scales(const uint8_t* p) {
  constexpr int kKeptOrSet = 0xea;  // a & b | c
  const __m512i bits = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i kept = _mm512_set1_epi32(static_cast<int>(kScaleBits)), set = _mm512_set1_epi32(kScaleLeast);
  return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_slli_epi32(bits, kScaleShift), kept, set, kKeptOrSet))};
}
// Sixteen fp16, and sixteen signed bytes.
inline Vec vload_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Vec vload_bytes(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Pairs pload(const bf16* p) { return {_mm512_loadu_si512(p)}; }
inline void pstore(bf16* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
// The first (0) or second elements of the pairs.
template <int kPart>
inline Vec pair_values(Pairs a) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(kPart == 0 ? _mm512_slli_epi32(a.v, 16) : _mm512_and_si512(a.v, high))};
}
// acc + w * x in the register of acc.
inline Vec fused(Vec acc, Vec w, Vec x) {  // not the intrinsic: see dot2
  asm("vfmadd231ps %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
  return acc;
}

#if defined(__AVX512BF16__)
// Stores a as bf16 and returns what was stored.
inline Vec vstore_rounded(bf16* p, Vec a) {
  const __m256i half = narrow(a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
  return widened(half);
}
inline Pairs pset(const bf16* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, 4);
  return {_mm512_set1_epi32(bits)};
}
// acc + w[2i] * a[2i] + w[2i + 1] * a[2i + 1], lane by lane.
inline Vec dot2(Vec acc, Pairs w, Pairs a) {
  // Not the intrinsic: gcc 12 copies and spills accumulators around it.
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(a.v));
  return acc;
}
#else
#define QUIRE_PAIRS_IN_PARTS 1  // see simd.h
// a rounded to bf16.
inline Vec vrounded(Vec a) { return widened(narrow(a)); }
template <int kPart>
inline Vec pair_part(Pairs a) {
  return pair_values<kPart>(a);
}
inline Vec pair_product(Vec acc, Vec w, Vec x) { return fused(acc, w, x); }
#endif

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
  // Not the intrinsic, see dot2; here it halves the speed of a large tile.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(u.v), "v"(s.v));
  return acc;
#else
  // 16-bit products: the byte form (maddubs) would saturate.
  const __m512i even =
      _mm512_madd_epi16(_mm512_and_si512(u.v, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(s.v, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u.v, 8), _mm512_srai_epi16(s.v, 8));
  return {_mm512_add_epi32(acc.v, _mm512_add_epi32(even, odd))};
#endif
}

#if !defined(__AVX512VNNI__)
#define QUIRE_QUADS_IN_PARTS 1  // see simd.h
template <int kPart>
inline Ints quad_part(Ints a) {
  return {_mm512_srai_epi16(kPart == 0 ? _mm512_slli_epi16(a.v, 8) : a.v, 8)};
}
inline Ints quad_product(Ints acc, Ints w, Ints x) {
  __m512i both;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(acc.v), "=&v"(both) : "v"(w.v), "v"(x.v));
  return acc;
}

inline Ints nibble_dot(Ints acc, Ints u, Ints s) { return {_mm512_add_epi16(acc.v, _mm512_maddubs_epi16(u.v, s.v))}; }
inline Ints nibble_total(Ints acc, int32_t offset) {
  return isub({_mm512_madd_epi16(acc.v, _mm512_set1_epi16(1))}, iset(offset));
}
#endif

}  // namespace quire
