// Codes of stored matrices into pairs of bf16, exactly: nibbles through a table, signed six bits and bytes, and e4m3.
//
// A load is 64 bytes for 16 lanes. Its words of 16 bits are the first and the second column of lane 0, of lane 1 and so
// on: four steps in the nibbles of each word, or two in its bytes, the first one lowest. Of six bits a load is three
// such, a panel's vectors apart: the low nibbles of four steps, those of the next four, and the high bits of all eight.
//
// Owns that layout of a load. Must not know: scales, where a load lies, products.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd/simd.h"
#include "weights/linear.h"

namespace quire {

// The bf16 of an e4m3; codes of NaN give what no one asks for.
constexpr bf16 e4m3_magnitude(int code) {
  constexpr bf16 kBelowNormal[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  constexpr int kBias = 127 - 7;
  return (code & 0x78) == 0 ? kBelowNormal[code & 7] : static_cast<bf16>(((code & 0x7f) << 4) + (kBias << 7));
}

// The codes of two columns of 16 / kBits steps into the word that a lane has of a load.
template <int kBits>
inline void pack_word(const uint8_t* codes, char* lane) {
  uint32_t word = 0;
  for (int i = 0; i < 32 / kBits; ++i) word |= static_cast<uint32_t>(codes[i]) << (i % 2 * 16 + i / 2 * kBits);
  std::memcpy(lane, &word, 4);
}

#if !defined(QUIRE_AVX512) && !defined(QUIRE_AVX2)
// f of every 16-bit word: the specification of what follows.
template <typename F>
inline Pairs of_words(Ints words, const F& f) {
  uint16_t halves[2 * kLanes];
  istore(halves, words);
  for (uint16_t& half : halves) half = f(half);
  return pload(halves);
}
#endif

#if defined(QUIRE_AVX2)
// table[index] of 16 bits, of tables of up to 16 entries whose low and high bytes lie apart; indices below 16.
class ByteTables {
 public:
  ByteTables() = default;
  explicit ByteTables(const bf16* table) {
    alignas(16) uint8_t low[16], high[16];
    for (int i = 0; i < 16; ++i) {
      low[i] = static_cast<uint8_t>(table[i]);
      high[i] = static_cast<uint8_t>(table[i] >> 8);
    }
    low_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(low)));
    high_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(high)));
  }
  __m256i at(__m256i index) const {  // a byte with the highest bit set gives zero
    const __m256i low = _mm256_or_si256(index, _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
    const __m256i high = _mm256_or_si256(_mm256_slli_epi16(index, 8), _mm256_set1_epi16(0x80));
    return _mm256_or_si256(_mm256_shuffle_epi8(low_, low), _mm256_shuffle_epi8(high_, high));
  }

 private:
  __m256i low_, high_;
};
#endif

#if defined(QUIRE_AVX2)
// Of signed integers, which end with the bit kEnd of every 16-bit word.
template <int kBits, int kEnd = kBits>
inline __m256i signed_bf16(__m256i x) {
  const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(x, 32 - kEnd), 32 - kBits);
  const __m256i odd = _mm256_srai_epi32(kEnd == 16 ? x : _mm256_slli_epi32(x, 16 - kEnd), 32 - kBits);
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(even)), 16);
  return _mm256_or_si256(low, _mm256_castps_si256(_mm256_cvtepi32_ps(odd)));
}
#endif

// Four bits through the matrix's table.
class Nibbles {
 public:
  static constexpr int kBits = 4;
  static constexpr int kSteps = 4;                   // of a load
  static constexpr int64_t kLoadBytes = kStepBytes;  // of a panel's lanes
  using Load = Ints;
  static Load load(const char* p) { return iload(p); }
  static void pack(const uint8_t* codes, char* lane) { pack_word<kBits>(codes, lane); }

#if defined(QUIRE_AVX512)
  explicit Nibbles(const Linear& w) : table_(_mm512_loadu_si512(w.table)) {}
  template <int kStep>
  Pairs pairs(Ints words) const {
    return {_mm512_permutexvar_epi16(_mm512_srli_epi16(words.v, 4 * kStep), table_)};
  }

 private:
  __m512i table_;
#elif defined(QUIRE_AVX2)
  explicit Nibbles(const Linear& w) : tables_(w.table) {}
  template <int kStep>
  Pairs pairs(Ints words) const {
    const auto half = [&](__m256i x) {
      return tables_.at(_mm256_and_si256(_mm256_srli_epi16(x, 4 * kStep), _mm256_set1_epi16(15)));
    };
    return {half(words.lo), half(words.hi)};
  }

 private:
  ByteTables tables_;
#else
  explicit Nibbles(const Linear& w) : table_(w.table) {}
  template <int kStep>
  Pairs pairs(Ints words) const {
    return of_words(words, [&](int word) { return table_[word >> 4 * kStep & 15]; });
  }

 private:
  const bf16* table_;
#endif
};

// Signed integers of six bits.
class SixBits {
 public:
  static constexpr int kBits = 6;
  static constexpr int kSteps = 8;
  static constexpr int64_t kLoadBytes = 3 * kStepBytes;
  struct Load {
    Ints low[2], high;
  };
  static Load load(const char* p) { return {{iload(p), iload(p + kStepBytes)}, iload(p + 2 * kStepBytes)}; }
  static void pack(const uint8_t* codes, char* lane) {
    uint8_t low[2 * kSteps], high[2 * kSteps];
    for (int i = 0; i < 2 * kSteps; ++i) {
      low[i] = codes[i] & 15;
      high[i] = codes[i] >> 4 & 3;
    }
    pack_word<4>(low, lane);
    pack_word<4>(low + kSteps, lane + kStepBytes);
    pack_word<2>(high, lane + 2 * kStepBytes);
  }

#if defined(QUIRE_AVX512)
  explicit SixBits(const Linear&) {
    alignas(64) bf16 values[64];
    for (int i = 0; i < 64; ++i) values[i] = to_bf16(static_cast<float>(i < 32 ? i : i - 64));
    positive_ = _mm512_load_si512(values);
    negative_ = _mm512_load_si512(values + 32);
  }
  template <int kStep>
  Pairs pairs(const Load& words) const {
    constexpr int kFirstOrSecond = 0xca;  // a ? b : c
    const __m512i low = _mm512_srli_epi16(words.low[kStep / 4].v, 4 * (kStep % 4));
    const __m512i high = kStep < 2 ? _mm512_slli_epi16(words.high.v, kStep < 2 ? 4 - 2 * kStep : 0)
                                   : _mm512_srli_epi16(words.high.v, kStep < 2 ? 0 : 2 * kStep - 4);
    // Only six bits of an index are looked at.
    const __m512i code = _mm512_ternarylogic_epi64(_mm512_set1_epi16(15), low, high, kFirstOrSecond);
    return {_mm512_permutex2var_epi16(positive_, code, negative_)};
  }

 private:
  __m512i positive_, negative_;
#elif defined(QUIRE_AVX2)
  explicit SixBits(const Linear&) {}
  template <int kStep>
  Pairs pairs(const Load& words) const {
    const auto half = [](__m256i low, __m256i high) {
      const __m256i shifted = kStep < 2 ? _mm256_slli_epi16(high, kStep < 2 ? 4 - 2 * kStep : 0)
                                        : _mm256_srli_epi16(high, kStep < 2 ? 0 : 2 * kStep - 4);
      const __m256i code =
          _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low, 4 * (kStep % 4)), _mm256_set1_epi16(15)),
                          _mm256_and_si256(shifted, _mm256_set1_epi16(48)));
      return signed_bf16<6>(code);
    };
    const Ints low = words.low[kStep / 4];
    return {half(low.lo, words.high.lo), half(low.hi, words.high.hi)};
  }
#else
  explicit SixBits(const Linear&) {}
  template <int kStep>
  Pairs pairs(const Load& words) const {
    uint16_t low[2 * kLanes], high[2 * kLanes];
    istore(low, words.low[kStep / 4]);
    istore(high, words.high);
    for (int i = 0; i < 2 * kLanes; ++i) {
      const int code = (low[i] >> 4 * (kStep % 4) & 15) | (high[i] >> 2 * kStep & 3) << 4;
      low[i] = to_bf16(static_cast<float>(code < 32 ? code : code - 64));
    }
    return pload(low);
  }
#endif
};

// Signed bytes, which bf16 holds exactly.
class SignedBytes {
 public:
  static constexpr int kBits = 8;
  static constexpr int kSteps = 2;
  static constexpr int64_t kLoadBytes = kStepBytes;
  using Load = Ints;
  static Load load(const char* p) { return iload(p); }
  static void pack(const uint8_t* codes, char* lane) { pack_word<kBits>(codes, lane); }

  explicit SignedBytes(const Linear&) {}

#if defined(QUIRE_AVX512)
  template <int kStep>
  Pairs pairs(Ints words) const {
    const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(words.v, 24 - 8 * kStep), 24);
    const __m512i odd = _mm512_srai_epi32(kStep == 0 ? _mm512_slli_epi32(words.v, 8) : words.v, 24);
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), 16);
    return {_mm512_or_si512(low, _mm512_castps_si512(_mm512_cvtepi32_ps(odd)))};  // whose low halves are zeros
  }
#elif defined(QUIRE_AVX2)
  template <int kStep>
  Pairs pairs(Ints words) const {
    return {signed_bf16<8, 8 * (kStep + 1)>(words.lo), signed_bf16<8, 8 * (kStep + 1)>(words.hi)};
  }
#else
  template <int kStep>
  Pairs pairs(Ints words) const {
    return of_words(words, [](int word) { return to_bf16(static_cast<int8_t>(word >> 8 * kStep & 255)); });
  }
#endif
};

// Floats of eight bits: sign, four bits of exponent, three of mantissa.
class E4m3 {
 public:
  static constexpr int kBits = 8;
  static constexpr int kSteps = 2;
  static constexpr int64_t kLoadBytes = kStepBytes;
  using Load = Ints;
  static Load load(const char* p) { return iload(p); }
  static void pack(const uint8_t* codes, char* lane) { pack_word<kBits>(codes, lane); }

#if defined(QUIRE_AVX512)
  explicit E4m3(const Linear&) {
    alignas(64) bf16 table[kCodes] = {};
    for (int i = 0; i < 8; ++i) table[i] = e4m3_magnitude(i);
    below_normal_ = _mm512_load_si512(table);
  }
  template <int kStep>
  Pairs pairs(Ints words) const {
    constexpr int kKeptOrMasked = 0xf8;  // a | b & c
    const __m512i code = kStep == 0 ? words.v : _mm512_srli_epi16(words.v, 8);
    const __m512i kept = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x7f)), 4);
    const __m512i normal = _mm512_add_epi16(kept, _mm512_set1_epi16((127 - 7) << 7));
    const __mmask32 below = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
    const __m512i magnitude = _mm512_mask_permutexvar_epi16(normal, below, code, below_normal_);
    const __m512i sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
    return {_mm512_ternarylogic_epi64(magnitude, _mm512_slli_epi16(code, 8), sign, kKeptOrMasked)};
  }

 private:
  static constexpr int kCodes = 32;  // a shuffle looks at five bits, of which two are zeros below the normal ones
  __m512i below_normal_;
#elif defined(QUIRE_AVX2)
  explicit E4m3(const Linear&) {
    bf16 table[16] = {};
    for (int i = 0; i < 8; ++i) table[i] = e4m3_magnitude(i);
    below_normal_ = ByteTables(table);
  }
  template <int kStep>
  Pairs pairs(Ints words) const {
    const auto half = [&](__m256i x) {
      const __m256i code = kStep == 0 ? x : _mm256_srli_epi16(x, 8);
      const __m256i kept = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x7f)), 4);
      const __m256i normal = _mm256_add_epi16(kept, _mm256_set1_epi16((127 - 7) << 7));
      const __m256i exponent = _mm256_and_si256(code, _mm256_set1_epi16(0x78));
      const __m256i below = _mm256_cmpeq_epi16(exponent, _mm256_setzero_si256());
      const __m256i least = below_normal_.at(_mm256_and_si256(code, _mm256_set1_epi16(7)));
      const __m256i sign =
          _mm256_and_si256(_mm256_slli_epi16(code, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
      return _mm256_or_si256(_mm256_blendv_epi8(normal, least, below), sign);
    };
    return {half(words.lo), half(words.hi)};
  }

 private:
  ByteTables below_normal_;
#else
  explicit E4m3(const Linear&) {}
  template <int kStep>
  Pairs pairs(Ints words) const {
    return of_words(words, [](int word) {
      const int code = word >> 8 * kStep & 255;
      return static_cast<bf16>(e4m3_magnitude(code) | (code & 0x80) << 8);
    });
  }
#endif
};

// Weights that were decoded before, a step in a load.
class DecodedPairs {
 public:
  static constexpr int kBits = 16;
  static constexpr int kSteps = 1;
  static constexpr int64_t kLoadBytes = kStepBytes;
  using Load = Pairs;
  static Load load(const char* p) { return pload(reinterpret_cast<const bf16*>(p)); }
  template <int>
  Pairs pairs(Pairs weights) const {
    return weights;
  }
};

}  // namespace quire
