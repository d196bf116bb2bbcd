// The AVX-512 and VNNI instructions that the kernels use, in those of AVX2: the intrinsics by their names without
// `_mm512_`, and what the sources ask to know of the machine. Included first.
//
// Promises: the documented results, those of every lane, with floats rounded to nearest; slow. A value that an
// instruction takes and these functions do not expect ends the program. Must not know: the kernels.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

// After <immintrin.h>, which would otherwise call for the instructions.
#if defined(EMULATE_avx512f)
#define __AVX512F__ 1
#endif
#if defined(EMULATE_avx512bw)
#define __AVX512BW__ 1
#endif
#if defined(EMULATE_avx512dq)
#define __AVX512DQ__ 1
#endif
#if defined(EMULATE_avx512vl)
#define __AVX512VL__ 1
#endif
#if defined(EMULATE_avx512_bf16)
#define __AVX512BF16__ 1
#endif
#if defined(EMULATE_avx512_vnni)
#define __AVX512VNNI__ 1
#endif
#if defined(EMULATE_avx_vnni)
#define __AVXVNNI__ 1
#endif

namespace emulated {

using Words [[gnu::vector_size(64)]] = uint32_t;
using Shorts [[gnu::vector_size(64)]] = int16_t;
using UnsignedShorts [[gnu::vector_size(64)]] = uint16_t;

template <typename To, typename From>
To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// One register, element by element.
template <typename T, int kBytes = 64>
struct Elements {
  static constexpr int kCount = kBytes / sizeof(T);
  T at[kCount];
  Elements() = default;
  template <typename Register>
  explicit Elements(Register r) : Elements(same_bits<Elements>(r)) {}
  template <typename Register>
  Register as() const {
    return same_bits<Register>(*this);
  }
};

[[noreturn]] inline void unexpected() { __builtin_trap(); }

// Both halves by an instruction of AVX2.
struct Halves {
  __m256i lo, hi;
};
struct FloatHalves {
  __m256 lo, hi;
};
inline Halves halves(__m512i a) { return same_bits<Halves>(a); }
inline FloatHalves halves(__m512 a) { return same_bits<FloatHalves>(a); }
inline __m512i whole(__m256i lo, __m256i hi) { return same_bits<__m512i>(Halves{lo, hi}); }
inline __m512 whole(__m256 lo, __m256 hi) { return same_bits<__m512>(FloatHalves{lo, hi}); }
template <typename F, typename A, typename... Rest>
auto by_halves(const F& f, A a, Rest... rest) {
  return whole(f(halves(a).lo, halves(rest).lo...), f(halves(a).hi, halves(rest).hi...));
}

// Loads, stores, constants, casts.
inline __m512 loadu_ps(const void* p) {
  __m512 a;
  std::memcpy(&a, p, 64);
  return a;
}
inline __m512i loadu_si512(const void* p) {
  __m512i a;
  std::memcpy(&a, p, 64);
  return a;
}
inline __m512i load_si512(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) unexpected();
  return loadu_si512(p);
}
inline void storeu_ps(void* p, __m512 a) { std::memcpy(p, &a, 64); }
inline void storeu_si512(void* p, __m512i a) { std::memcpy(p, &a, 64); }
inline __m512 setzero_ps() { return __m512{}; }
inline __m512i setzero_si512() { return __m512i{}; }
inline __m512 set1_ps(float x) { return whole(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
inline __m512i set1_epi32(int x) { return whole(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
inline __m512i set1_epi16(short x) { return whole(_mm256_set1_epi16(x), _mm256_set1_epi16(x)); }
inline __m512i set1_epi8(char x) { return whole(_mm256_set1_epi8(x), _mm256_set1_epi8(x)); }
inline __m512i set4_epi32(int d, int c, int b, int a) {
  const __m256i half = _mm256_set_epi32(d, c, b, a, d, c, b, a);
  return whole(half, half);
}
inline __m512i castps_si512(__m512 a) { return (__m512i)a; }
inline __m512 castsi512_ps(__m512i a) { return (__m512)a; }
inline __m256 castps512_ps256(__m512 a) { return halves(a).lo; }
inline __m256 extractf32x8_ps(__m512 a, int half) { return half == 0 ? halves(a).lo : halves(a).hi; }

// Floats.
inline __m512 add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 div_ps(__m512 a, __m512 b) { return a / b; }
inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return by_halves([](__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); }, a, b, c);
}
inline __m512 max_ps(__m512 a, __m512 b) {
  return by_halves([](__m256 x, __m256 y) { return _mm256_max_ps(x, y); }, a, b);
}
inline __m512 min_ps(__m512 a, __m512 b) {
  return by_halves([](__m256 x, __m256 y) { return _mm256_min_ps(x, y); }, a, b);
}
inline __m512 roundscale_ps(__m512 a, int how) {
  if (how != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) unexpected();
  return by_halves([](__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }, a);
}
inline __m512 scalef_ps(__m512 a, __m512 b) {
  Elements<float> x(a), n(b);
  for (int i = 0; i < x.kCount; ++i) {
    x.at[i] = std::isnan(n.at[i]) ? n.at[i] : std::ldexp(x.at[i], static_cast<int>(std::floor(n.at[i])));
  }
  return x.as<__m512>();
}
inline float reduce_max_ps(__m512 a) {
  const Elements<float> x(a);
  float most = x.at[0];
  for (const float value : x.at) most = value > most ? value : most;
  return most;
}
inline __mmask16 cmp_ps_mask(__m512 a, __m512 b, int how) {
  if (how != _CMP_UNORD_Q) unexpected();
  const Elements<float> x(a), y(b);
  unsigned mask = 0;
  for (int i = 0; i < x.kCount; ++i) mask |= unsigned{std::isnan(x.at[i]) || std::isnan(y.at[i])} << i;
  return static_cast<__mmask16>(mask);
}

// Integers.
inline __m512i add_epi32(__m512i a, __m512i b) { return (__m512i)((Words)a + (Words)b); }
inline __m512i sub_epi32(__m512i a, __m512i b) { return (__m512i)((Words)a - (Words)b); }
inline __m512i add_epi16(__m512i a, __m512i b) { return (__m512i)((UnsignedShorts)a + (UnsignedShorts)b); }
inline __m512i and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i or_si512(__m512i a, __m512i b) { return a | b; }
inline __m512i slli_epi32(__m512i a, int n) { return (__m512i)((Words)a << n); }
inline __m512i srli_epi32(__m512i a, int n) { return (__m512i)((Words)a >> n); }
inline __m512i slli_epi16(__m512i a, int n) { return (__m512i)((UnsignedShorts)a << n); }
inline __m512i srli_epi16(__m512i a, int n) { return (__m512i)((UnsignedShorts)a >> n); }
inline __m512i srai_epi32(__m512i a, int n) {
  return by_halves([n](__m256i x) { return _mm256_srai_epi32(x, n); }, a);
}
inline __m512i srai_epi16(__m512i a, int n) { return (__m512i)((Shorts)a >> n); }
inline __m512i madd_epi16(__m512i a, __m512i b) {
  return by_halves([](__m256i x, __m256i y) { return _mm256_madd_epi16(x, y); }, a, b);
}
inline __m512i maddubs_epi16(__m512i a, __m512i b) {
  return by_halves([](__m256i x, __m256i y) { return _mm256_maddubs_epi16(x, y); }, a, b);
}
inline __m512i max_epu16(__m512i a, __m512i b) {
  return by_halves([](__m256i x, __m256i y) { return _mm256_max_epu16(x, y); }, a, b);
}
inline __m512i shuffle_epi8(__m512i a, __m512i b) {
  return by_halves([](__m256i x, __m256i y) { return _mm256_shuffle_epi8(x, y); }, a, b);
}
inline __m512i permutexvar_epi16(__m512i index, __m512i a) {
  Elements<uint16_t> at(index);
  const Elements<uint16_t> x(a);
  for (uint16_t& element : at.at) element = x.at[element % x.kCount];
  return at.as<__m512i>();
}
inline __m512i ternarylogic(__m512i a, __m512i b, __m512i c, int truth) {
  __m512i result{};
  for (int row = 0; row < 8; ++row) {
    if (truth >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  }
  return result;
}

// From one width of elements to another.
template <typename To, typename From, typename Register, int kTo, int kFrom, typename Source>
Register converted(Source a) {
  const Elements<From, kFrom> x(a);
  Elements<To, kTo> y;
  static_assert(x.kCount == y.kCount);
  for (int i = 0; i < x.kCount; ++i) y.at[i] = static_cast<To>(x.at[i]);
  return y.template as<Register>();
}
inline __m512i cvtepu16_epi32(__m256i a) { return converted<uint32_t, uint16_t, __m512i, 64, 32>(a); }
inline __m512i cvtepi8_epi32(__m128i a) { return converted<int32_t, int8_t, __m512i, 64, 16>(a); }
inline __m256i cvtepi32_epi16(__m512i a) { return converted<int16_t, int32_t, __m256i, 32, 64>(a); }
inline __m128i cvtepi32_epi8(__m512i a) { return converted<int8_t, int32_t, __m128i, 16, 64>(a); }
inline __m512 cvtepi32_ps(__m512i a) { return converted<float, int32_t, __m512, 64, 64>(a); }
inline __m512i cvtps_epi32(__m512 a) {
  return whole(_mm256_cvtps_epi32(halves(a).lo), _mm256_cvtps_epi32(halves(a).hi));
}
inline __m512 cvtph_ps(__m256i a) {
  const Elements<uint16_t, 32> halves(a);
  Elements<float> x{};
  for (int i = 0; i < x.kCount; ++i) {
    const int exponent = halves.at[i] >> 10 & 31, mantissa = halves.at[i] & 1023;
    if (exponent == 31) unexpected();
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                          : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
    x.at[i] = halves.at[i] >> 15 != 0 ? -magnitude : magnitude;
  }
  return x.as<__m512>();
}
// To nearest, denormals to zero, a NaN to a quiet one.
inline __m256i cvtneps_pbh(__m512 a) {
  Elements<uint32_t> x(a);
  for (uint32_t& bits : x.at) {
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
      bits = bits >> 16 | 0x40;
    } else {
      bits = magnitude < 0x800000 ? bits >> 16 & 0x8000 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
  }
  return converted<uint16_t, uint32_t, __m256i, 32, 64>(x.as<__m512i>());
}

// Under masks.
inline __m512i mask_mov_epi32(__m512i from, __mmask16 mask, __m512i a) {
  Elements<uint32_t> x(from);
  const Elements<uint32_t> y(a);
  for (int i = 0; i < x.kCount; ++i) x.at[i] = mask >> i & 1 ? y.at[i] : x.at[i];
  return x.as<__m512i>();
}
inline __m512i mask_permutexvar_epi16(__m512i from, __mmask32 mask, __m512i index, __m512i a) {
  Elements<uint16_t> x(from);
  const Elements<uint16_t> y(permutexvar_epi16(index, a));
  for (int i = 0; i < x.kCount; ++i) x.at[i] = mask >> i & 1 ? y.at[i] : x.at[i];
  return x.as<__m512i>();
}
inline __mmask32 testn_epi16_mask(__m512i a, __m512i b) {
  const Elements<uint16_t> x(and_si512(a, b));
  unsigned mask = 0;
  for (int i = 0; i < x.kCount; ++i) mask |= unsigned{x.at[i] == 0} << i;
  return mask;
}
inline __m512i mask_set1_epi16(__m512i from, __mmask32 mask, short value) {
  Elements<int16_t> x(from);
  for (int i = 0; i < x.kCount; ++i) x.at[i] = mask >> i & 1 ? value : x.at[i];
  return x.as<__m512i>();
}
inline void mask_storeu_epi16(void* p, __mmask32 mask, __m512i a) {
  const Elements<uint16_t> x(a);
  for (int i = 0; i < x.kCount; ++i) {
    if (mask >> i & 1) std::memcpy(static_cast<char*>(p) + 2 * i, &x.at[i], 2);
  }
}

// The instructions that the kernels spell out: `acc` is what they add to.
inline void vfmadd231ps(__m512& acc, __m512 a, __m512 b) { acc = fmadd_ps(a, b, acc); }
inline void vfmadd231ps(__m256& acc, __m256 a, __m256 b) { acc = _mm256_fmadd_ps(a, b, acc); }
inline void vpmaddwd_vpaddd(__m512i& acc, __m512i a, __m512i b) { acc = add_epi32(acc, madd_epi16(a, b)); }
inline void vpmaddwd_vpaddd(__m256i& acc, __m256i a, __m256i b) {
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
}
inline void vdpbf16ps(__m512& acc, __m512i a, __m512i b) {
  const __m512i high = set1_epi32(static_cast<int>(0xffff0000));
  acc = fmadd_ps((__m512)and_si512(a, high), (__m512)and_si512(b, high), acc);
  acc = fmadd_ps((__m512)slli_epi32(a, 16), (__m512)slli_epi32(b, 16), acc);
}
// u unsigned bytes, s signed bytes.
inline __m256i quads(__m256i u, __m256i s) {
  const __m256i even =
      _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  return _mm256_add_epi32(even, _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8)));
}
inline void vpdpbusd(__m256i& acc, __m256i u, __m256i s) { acc = _mm256_add_epi32(acc, quads(u, s)); }
inline void vpdpbusd(__m512i& acc, __m512i u, __m512i s) { acc = add_epi32(acc, by_halves(quads, u, s)); }

}  // namespace emulated
