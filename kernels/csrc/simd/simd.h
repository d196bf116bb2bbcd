// Sixteen float lanes, whatever the machine has: one AVX-512 register, two of AVX2, or four of 16 bytes.
//
// Promises: every operation treats each lane alone and in the same order on every call, so that a result never depends
// on its neighbours. The portable one is the specification of the others. Must not know: matrices, attention.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define QUIRE_AVX512 1
#include "simd/simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#define QUIRE_AVX2 1
#include "simd/simd_avx2.h"
#else
#include "simd/simd_portable.h"
#endif
#include "simd/tiles.h"
// Behind the others, whose macros it reads.
#include "simd/instructions.h"

namespace quire {

// How many of such vectors the registers hold.
#if defined(QUIRE_AVX512)
constexpr int kRegisters = 32;
#elif defined(QUIRE_AVX2) || defined(__aarch64__)
constexpr int kRegisters = 8;
#else
constexpr int kRegisters = 4;
#endif

// A product of pairs or of quads is one instruction, or one for each of two parts of their elements, in order. What
// many products share is taken apart once: weights into parts, the other side into the factors that are broadcast.
#if defined(QUIRE_PAIRS_IN_PARTS)
// Two products of floats, the first elements and the second ones.
constexpr int kPairParts = 2;
using PairFactor = float;
using PairPart = Vec;
// Rounds a to bf16, stores the factors and returns their values.
inline Vec store_factors(PairFactor* p, Vec a) {
  const Vec rounded = vrounded(a);
  vstore(p, rounded);
  return rounded;
}
inline PairPart pair_factor(const PairFactor* p) { return vset(*p); }
#else
constexpr int kPairParts = 1;
using PairFactor = bf16;
using PairPart = Pairs;
inline Vec store_factors(PairFactor* p, Vec a) { return vstore_rounded(p, a); }
// Of the pair, or of one of its elements.
inline PairPart pair_factor(const PairFactor* p) { return pset(p); }
template <int kPart>
inline PairPart pair_part(Pairs a) {
  return a;
}
inline Vec pair_product(Vec acc, PairPart w, PairPart x) { return dot2(acc, w, x); }
#endif

#if defined(QUIRE_QUADS_IN_PARTS)
// Two products of 16-bit pairs, the bytes 0 and 2 and the bytes 1 and 3. Sixteen products of bytes by nibbles stay
// below 2^15: a group is summed in 16 bits.
constexpr int kQuadParts = 2;
inline Ints nibble_start(int32_t) { return izero(); }
#else
constexpr int kQuadParts = 1;
template <int kPart>
inline Ints quad_part(Ints a) {
  return a;
}
inline Ints quad_product(Ints acc, Ints w, Ints x) { return dot4(acc, x, w); }  // w signed, x unsigned bytes

// The sums of a group's nibbles (at most 15, unsigned) times bytes of -127..127, less an offset.
inline Ints nibble_start(int32_t offset) { return iset(-offset); }
inline Ints nibble_dot(Ints acc, Ints u, Ints s) { return dot4(acc, u, s); }
inline Ints nibble_total(Ints acc, int32_t) { return acc; }
#endif

// Four bytes in every lane.
inline Ints quad_factor(const char* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, 4);
  return iset(bytes);
}

// Halves added to each other until one lane is left.
inline float lane_sum(Vec a) {
#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
#if defined(QUIRE_AVX512)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[kLanes];
  vstore(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
#endif
}

inline int32_t lane_sum(Ints a) {
  int32_t lanes[kLanes];
  istore(lanes, a);
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

// The largest of the numbers' patterns without signs, which rise with the magnitude and end with infinity and NaN.
inline bf16 largest_magnitude(const bf16* x, int64_t n) {
  bf16 largest = 0;
  int64_t at = 0;
#if defined(QUIRE_AVX512)
  constexpr int64_t kWidth = 32;
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i most = _mm512_setzero_si512();
  for (; at + kWidth <= n; at += kWidth) {
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(x + at), magnitude));
  }
  bf16 lanes[kWidth];
  _mm512_storeu_si512(lanes, most);
  for (const bf16 lane : lanes) largest = lane > largest ? lane : largest;
#elif defined(QUIRE_AVX2)
  constexpr int64_t kWidth = 16;
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  __m256i most = _mm256_setzero_si256();
  for (; at + kWidth <= n; at += kWidth) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + at));
    most = _mm256_max_epu16(most, _mm256_and_si256(bits, magnitude));
  }
  bf16 lanes[kWidth];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), most);
  for (const bf16 lane : lanes) largest = lane > largest ? lane : largest;
#endif
  for (; at < n; ++at) {
    const bf16 bits = x[at] & 0x7fff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Sixteen values into the first (`half` 0) or second halves of sixteen pairs; the other halves are not touched, since
// another thread may write them at the same time.
inline void store_halves(bf16* pairs, int64_t half, const bf16* values) {
#if defined(QUIRE_AVX512)
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
  const __m512i both = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
  _mm512_mask_storeu_epi16(pairs, half == 0 ? 0x55555555u : 0xaaaaaaaau, both);
#else
  for (int i = 0; i < kLanes; ++i) pairs[2 * i + half] = values[i];
#endif
}

// The low byte of each lane.
inline void store_bytes(void* p, Ints a) {
#if defined(QUIRE_AVX512)
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
#elif defined(QUIRE_AVX2)
  const __m256i byte = _mm256_set1_epi32(255);
  const __m256i words = packed(_mm256_and_si256(a.lo, byte), _mm256_and_si256(a.hi, byte));
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(static_cast<__m128i*>(p), bytes);
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
#elif defined(QUIRE_AVX2)
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
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

// 2^x, with x cut to -126..127. The minimax polynomial of degree 5 for 2^r, |r| <= 1/2, exact at 0; error < 3 ulp.
inline Vec vexp2(Vec x) {
  const Vec clipped = vmax(vset(-126.0f), vmin(vset(127.0f), x));
  const Vec n = vround(clipped);
  const Vec r = vsub(clipped, n);
  Vec p = vset(1.3264727166e-3f);
  p = vfma(p, r, vset(9.6715126419e-3f));
  p = vfma(p, r, vset(5.5507337434e-2f));
  p = vfma(p, r, vset(2.4022242085e-1f));
  p = vfma(p, r, vset(6.9314697760e-1f));
  p = vfma(p, r, vset(1.0f));
  return vscale2(p, n);
}

}  // namespace quire
