// The lanes of simd.h as four vectors of 16 bytes in the compiler's own notation, for every machine: SSE2, NEON, or
// scalars where there is neither. With ARM's products of bf16 pairs and of bytes where they may be used.
//
// Owns the meaning of each operation: it is the specification of the other two. Must not know: matrices, attention.
#pragma once

#include "simd/bf16.h"
#include "simd/unroll.h"
#include "weights/scale.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define QUIRE_NEON_BF16 1
#endif

namespace quire {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first element of a pair is the low half of its lane");

using Float4 [[gnu::vector_size(16)]] = float;
using Int4 [[gnu::vector_size(16)]] = int32_t;
using Word4 [[gnu::vector_size(16)]] = uint32_t;
using Short8 [[gnu::vector_size(16)]] = int16_t;
using Half8 [[gnu::vector_size(16)]] = uint16_t;
using Half4 [[gnu::vector_size(8)]] = uint16_t;

struct Vec {
  Float4 q[4];
};
// 16 pairs of bf16: lane i holds elements 2i and 2i + 1.
struct Pairs {
  Word4 q[4];
};
// Sixteen 32-bit integer sums, and sixteen quads of bytes.
struct Ints {
  Int4 q[4];
};

// f(0), f(1), f(2), f(3), each known to the compiler: only then are all of them kept in registers.
template <typename T, typename F>
inline T each(const F& f) {
  return {{f(std::integral_constant<int, 0>{}), f(std::integral_constant<int, 1>{}),
           f(std::integral_constant<int, 2>{}), f(std::integral_constant<int, 3>{})}};
}
template <typename T>
inline T loaded(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}
// The same bits.
template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return loaded<To>(&from);
}
template <typename T, typename From>
inline T converted(From from) {
  return __builtin_convertvector(from, T);
}

// a * b + c, rounded once where the machine can.
inline Float4 fma(Float4 a, Float4 b, Float4 c) {
#if defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
// Half to even. From 2^23 on every float is integral.
inline Float4 round(Float4 a) {
  const Int4 sign = bits_as<Int4>(a) & INT32_MIN;
  const Float4 large = bits_as<Float4>(sign | bits_as<Int4>(Float4{} + 0x1p23f));
  const Float4 magnitude = bits_as<Float4>(bits_as<Int4>(a) & INT32_MAX);
  return magnitude < 0x1p23f ? (a + large) - large : a;
}
// Four bf16 in the low halves, as to_bf16 rounds them.
inline Word4 narrowed(Float4 a) {
  const Word4 bits = bits_as<Word4>(a), cut = bits >> 16;
  const Word4 rounded = (bits + 0x7fff + (cut & 1)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? cut | 0x40 : rounded;
}
inline Float4 widened(Word4 low_halves) { return bits_as<Float4>(low_halves << 16); }

inline Vec vset(float x) {
  return each<Vec>([=](auto) { return Float4{x, x, x, x}; });
}
inline Vec vzero() { return vset(0.0f); }
inline Vec vload(const float* p) { return loaded<Vec>(p); }
inline void vstore(float* p, Vec a) { std::memcpy(p, &a, sizeof(a)); }
inline Vec vadd(Vec a, Vec b) {
  return each<Vec>([&](auto i) { return a.q[i] + b.q[i]; });
}
inline Vec vsub(Vec a, Vec b) {
  return each<Vec>([&](auto i) { return a.q[i] - b.q[i]; });
}
inline Vec vmul(Vec a, Vec b) {
  return each<Vec>([&](auto i) { return a.q[i] * b.q[i]; });
}
inline Vec vdiv(Vec a, Vec b) {
  return each<Vec>([&](auto i) { return a.q[i] / b.q[i]; });
}
inline Vec vfma(Vec a, Vec b, Vec c) {
  return each<Vec>([&](auto i) { return fma(a.q[i], b.q[i], c.q[i]); });
}
inline Vec vmax(Vec a, Vec b) {
  return each<Vec>([&](auto i) { return a.q[i] > b.q[i] ? a.q[i] : b.q[i]; });
}
inline Vec vmin(Vec a, Vec b) {
  return each<Vec>([&](auto i) { return a.q[i] < b.q[i] ? a.q[i] : b.q[i]; });
}
inline Vec vround(Vec a) {
  return each<Vec>([&](auto i) { return round(a.q[i]); });
}
// a * 2^n for integral n in [-126, 127].
inline Vec vscale2(Vec a, Vec n) {
  return each<Vec>([&](auto i) {
    return n.q[i] == n.q[i] ? a.q[i] * bits_as<Float4>((converted<Int4>(n.q[i]) + 127) << 23) : n.q[i];
  });
}
inline Vec vload_bf16(const bf16* p) {
  return each<Vec>([=](auto i) { return widened(converted<Word4>(loaded<Half4>(p + 4 * i))); });
}
inline void vstore_bf16(bf16* p, Vec a) {
  unrolled<4>([&](auto i) {
    const Half4 halves = converted<Half4>(narrowed(a.q[i]));
    std::memcpy(p + 4 * i, &halves, sizeof(halves));
  });
}
inline Vec vload_scales(const uint8_t* p) {
  return each<Vec>([=](auto i) {
    const uint8_t* four = p + 4 * i;
    return Float4{scale_of(four[0]), scale_of(four[1]), scale_of(four[2]), scale_of(four[3])};
  });
}
// Sixteen fp16, all finite, and sixteen signed bytes.
inline Vec vload_half(const uint16_t* p) {
  return each<Vec>([=](auto i) {
    const Word4 bits = converted<Word4>(loaded<Half4>(p + 4 * i)), magnitude = bits & 0x7fff;
    // Those below the normal ones are multiples of 2^-24.
    const Float4 small = converted<Float4>(magnitude) * 0x1p-24f;
    const Word4 normal = (magnitude << 13) + ((127 - 15) << 23);
    const Word4 value = magnitude < 0x400 ? bits_as<Word4>(small) : normal;
    return bits_as<Float4>(value | (bits >> 15) << 31);
  });
}
inline Vec vload_bytes(const int8_t* p) {
  return each<Vec>([=](auto i) {
    const int8_t* four = p + 4 * i;
    return converted<Float4>(Int4{four[0], four[1], four[2], four[3]});
  });
}
inline Pairs pload(const bf16* p) { return loaded<Pairs>(p); }
inline void pstore(bf16* p, Pairs a) { std::memcpy(p, &a, sizeof(a)); }

inline Ints iset(int32_t x) {
  return each<Ints>([=](auto) { return Int4{x, x, x, x}; });
}
inline Ints izero() { return iset(0); }
inline Ints iload(const void* p) { return loaded<Ints>(p); }
inline void istore(void* p, Ints a) { std::memcpy(p, &a, sizeof(a)); }
inline Ints iadd(Ints a, Ints b) {
  return each<Ints>([&](auto i) { return a.q[i] + b.q[i]; });
}
inline Ints isub(Ints a, Ints b) {
  return each<Ints>([&](auto i) { return a.q[i] - b.q[i]; });
}
inline Vec to_vec(Ints a) {
  return each<Vec>([&](auto i) { return converted<Float4>(a.q[i]); });
}
inline Ints to_ints(Vec a) {  // ties to even
  return each<Ints>([&](auto i) { return converted<Int4>(round(a.q[i])); });
}
inline Ints low_nibbles(Ints a) {
  return each<Ints>([&](auto i) { return a.q[i] & 0x0f0f0f0f; });
}
inline Ints high_nibbles(Ints a) {
  return each<Ints>([&](auto i) { return (a.q[i] >> 4) & 0x0f0f0f0f; });
}

// The bytes 0 and 2 of each lane, or 1 and 3, as 16 bits.
template <int kPart>
inline Half8 unsigned_part(Int4 a) {
  const Half8 halves = bits_as<Half8>(a);
  return kPart == 0 ? halves & 255 : halves >> 8;
}
template <int kPart>
inline Short8 signed_part(Int4 a) {
  const Half8 halves = bits_as<Half8>(a);
  return bits_as<Short8>(kPart == 0 ? halves << 8 : halves) >> 8;
}
// The sums of each lane's two 16-bit numbers.
inline Int4 pair_sums(Int4 a) { return (bits_as<Int4>(bits_as<Word4>(a) << 16) >> 16) + (a >> 16); }
// acc + a[2i] * b[2i] + a[2i + 1] * b[2i + 1], products that fit 16 bits.
inline Int4 add_products(Int4 acc, Short8 a, Short8 b) {
#if defined(__SSE2__)
  return acc + bits_as<Int4>(_mm_madd_epi16(bits_as<__m128i>(a), bits_as<__m128i>(b)));
#elif defined(__aarch64__)
  return vpadalq_s16(acc, a * b);
#else
  return acc + pair_sums(bits_as<Int4>(a * b));
#endif
}
// acc + the four products u * s of each lane: u unsigned bytes, s signed bytes.
inline Ints dot4(Ints acc, Ints u, Ints s) {
  return each<Ints>([&](auto i) {
#if defined(QUIRE_NEON_BF16)
    return vusdotq_s32(acc.q[i], bits_as<uint8x16_t>(u.q[i]), bits_as<int8x16_t>(s.q[i]));
#else
    const Int4 even = add_products(acc.q[i], bits_as<Short8>(unsigned_part<0>(u.q[i])), signed_part<0>(s.q[i]));
    return add_products(even, bits_as<Short8>(unsigned_part<1>(u.q[i])), signed_part<1>(s.q[i]));
#endif
  });
}

#if defined(QUIRE_NEON_BF16)
inline Vec vstore_rounded(bf16* p, Vec a) {
  vstore_bf16(p, a);
  return vload_bf16(p);
}
inline Pairs pset(const bf16* pair) {
  const uint32_t bits = loaded<uint32_t>(pair);
  return each<Pairs>([=](auto) { return Word4{bits, bits, bits, bits}; });
}
// acc + w[2i] * a[2i] + w[2i + 1] * a[2i + 1], lane by lane.
inline Vec dot2(Vec acc, Pairs w, Pairs a) {
  return each<Vec>(
      [&](auto i) { return vbfdotq_f32(acc.q[i], bits_as<bfloat16x8_t>(w.q[i]), bits_as<bfloat16x8_t>(a.q[i])); });
}
#else
#define QUIRE_PAIRS_IN_PARTS 1  // see simd.h
// a rounded to bf16.
inline Vec vrounded(Vec a) {
  return each<Vec>([&](auto i) { return widened(narrowed(a.q[i])); });
}
template <int kPart>
inline Vec pair_part(Pairs a) {
  return each<Vec>([&](auto i) { return bits_as<Float4>(kPart == 0 ? a.q[i] << 16 : a.q[i] & 0xffff0000u); });
}
inline Vec pair_product(Vec acc, Vec w, Vec x) { return vfma(w, x, acc); }

#define QUIRE_QUADS_IN_PARTS 1  // see simd.h
template <int kPart>
inline Ints quad_part(Ints a) {
  return each<Ints>([&](auto i) { return bits_as<Int4>(signed_part<kPart>(a.q[i])); });
}
inline Ints quad_product(Ints acc, Ints w, Ints x) {
  return each<Ints>([&](auto i) { return add_products(acc.q[i], bits_as<Short8>(w.q[i]), bits_as<Short8>(x.q[i])); });
}

inline Ints nibble_dot(Ints acc, Ints u, Ints s) {
  return each<Ints>([&](auto i) {
    const Short8 even = bits_as<Short8>(unsigned_part<0>(u.q[i])) * signed_part<0>(s.q[i]);
    const Short8 odd = bits_as<Short8>(unsigned_part<1>(u.q[i])) * signed_part<1>(s.q[i]);
    return bits_as<Int4>(bits_as<Short8>(acc.q[i]) + even + odd);
  });
}
inline Ints nibble_total(Ints acc, int32_t offset) {
  return each<Ints>([&](auto i) { return pair_sums(acc.q[i]) - offset; });
}
#endif

}  // namespace quire
