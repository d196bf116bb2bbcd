// bf16 weights in twelve bits each, bit for bit.
//
// The exponents of a trained matrix take few values (Zhang et al. 2025, "70% Size, 100% Accuracy: Lossless LLM
// Compression", find 2.6 bits of information in the eight). A coded panel keeps a weight's sign and mantissa as they
// are and its exponent as the distance, 0 to 15, from the panel's lowest; the few weights beyond are repaired from a
// list. A fixed width decodes with four shuffles for 128 weights, faster than memory delivers them.
//
// A coded panel: a CodedHeader with its repairs in order and one past the last step, up to a multiple of 64 bytes, then
// [steps][192 bytes]. The 128 weights of a step are four vectors of 32. Word i of the first 64 bytes holds vectors 0
// and 1: sign 0, mantissa 1, sign 1, mantissa 0 from the highest bit down; the next 64 bytes hold vectors 2 and 3
// likewise; word i of the last 64 bytes holds the four distances, vector 0 in the lowest bits.
//
// Owns that layout. Must not know: products, where a panel lies.
#pragma once

#include <climits>
#include <cstdint>

#include "simd/simd.h"
#include "simd/unroll.h"

namespace quire {

constexpr int kCodedWords = 32;   // of a vector
constexpr int kCodedVectors = 4;  // of a step
constexpr int kCodedStepWeights = kCodedWords * kCodedVectors;
constexpr int kCodedStepBytes = 192;
constexpr int kCodes = 16;         // exponents of a panel
constexpr int kExponentShift = 7;  // of bf16
constexpr bf16 kSignAndMantissa = 0x807f;

struct Repair {
  int32_t step;
  uint16_t at;  // of the step's 128 weights
  bf16 value;
};

struct CodedHeader {
  int32_t lowest;  // the exponent of distance 0
  int32_t repairs;
  Repair first[1];  // repairs + 1 of them; the last has the step INT32_MAX

  // In bytes, with `repairs` repairs.
  static int64_t size(int64_t repairs) {
    return (8 + (repairs + 1) * static_cast<int64_t>(sizeof(Repair)) + 63) / 64 * 64;
  }
};

// Reads the steps of one coded panel, one after the other.
class CodedSteps {
 public:
  static constexpr int64_t kBytes = kCodedStepBytes;

  CodedSteps(const char* panel, int64_t first) : step_(first) {
    const auto* header = reinterpret_cast<const CodedHeader*>(panel);
    at_ = panel + CodedHeader::size(header->repairs) + first * kCodedStepBytes;
    due_ = header->first;
    while (due_->step < first) ++due_;
#if defined(QUIRE_AVX512)
    alignas(64) bf16 exponents[kCodedWords];  // shuffles look at five bits, of which one belongs to another vector
    for (int i = 0; i < kCodedWords; ++i) {
      exponents[i] = static_cast<bf16>((header->lowest + i % kCodes) << kExponentShift);
    }
    exponents_ = _mm512_load_si512(exponents);
#else
    lowest_ = static_cast<bf16>(header->lowest << kExponentShift);
#endif
  }

  // Where the next step lies.
  const char* at() const { return at_; }

  // All vectors of the step.
  void next(Pairs (&weights)[kCodedVectors], int = 0) {
    decode(weights);
    at_ += kCodedStepBytes;
    if (__builtin_expect(step_++ == due_->step, 0)) repair(weights);
  }

 private:
#if defined(QUIRE_AVX512)
  // Without a way through memory, whose loads would wait for the narrow store.
  void repair(Pairs (&weights)[kCodedVectors]) {
    for (; due_->step < step_; ++due_) {
      const __mmask32 lane = 1u << due_->at % kCodedWords;
      const auto value = static_cast<int16_t>(due_->value);
      unrolled<kCodedVectors>([&](auto v) {
        const __mmask32 mine = due_->at / kCodedWords == v ? lane : 0;
        weights[v].v = _mm512_mask_set1_epi16(weights[v].v, mine, value);
      });
    }
  }

  void decode(Pairs (&weights)[kCodedVectors]) const {
    const __m512i even = _mm512_loadu_si512(at_), odd = _mm512_loadu_si512(at_ + 64);
    const __m512i distances = _mm512_loadu_si512(at_ + 128);
    weights[0].v = joined(even, distances);
    weights[1].v = joined(exchanged(even), _mm512_srli_epi16(distances, 4));
    weights[2].v = joined(odd, _mm512_srli_epi16(distances, 8));
    weights[3].v = joined(exchanged(odd), _mm512_srli_epi16(distances, 12));
  }

  static __m512i exchanged(__m512i words) {
    const __m512i order = _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001);
    return _mm512_shuffle_epi8(words, order);
  }

  __m512i joined(__m512i kept, __m512i distances) const {
    constexpr int kKeptOrExponent = 0xea;  // a & b | c
    const __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(kSignAndMantissa));
    const __m512i exponents = _mm512_permutexvar_epi16(distances, exponents_);
    return _mm512_ternarylogic_epi64(kept, mask, exponents, kKeptOrExponent);
  }

  __m512i exponents_;
#else
  void repair(Pairs (&weights)[kCodedVectors]) {
    bf16 lanes[kCodedStepWeights];
    for (int v = 0; v < kCodedVectors; ++v) pstore(lanes + v * kCodedWords, weights[v]);
    for (; due_->step < step_; ++due_) lanes[due_->at] = due_->value;
    for (int v = 0; v < kCodedVectors; ++v) weights[v] = pload(lanes + v * kCodedWords);
  }

#if defined(QUIRE_AVX2)
  void decode(Pairs (&weights)[kCodedVectors]) const {
    for (int half = 0; half < 2; ++half) {
      const auto* words = reinterpret_cast<const __m256i*>(at_) + half;
      const __m256i even = _mm256_loadu_si256(words), odd = _mm256_loadu_si256(words + 2);
      const __m256i distances = _mm256_loadu_si256(words + 4);
      const auto lane = [&](int v) -> __m256i& { return half == 0 ? weights[v].lo : weights[v].hi; };
      lane(0) = joined(even, _mm256_slli_epi16(distances, kExponentShift));
      lane(1) = joined(exchanged(even), _mm256_slli_epi16(distances, kExponentShift - 4));
      lane(2) = joined(odd, _mm256_srli_epi16(distances, 8 - kExponentShift));
      lane(3) = joined(exchanged(odd), _mm256_srli_epi16(distances, 12 - kExponentShift));
    }
  }

  static __m256i exchanged(__m256i words) {
    const __m128i order = _mm_set_epi64x(0x0e0f0c0d0a0b0809, 0x0607040502030001);
    return _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(order));
  }

  // `distances` already where an exponent's lowest bits are.
  __m256i joined(__m256i kept, __m256i distances) const {
    const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(kSignAndMantissa));
    const __m256i codes = _mm256_set1_epi16((kCodes - 1) << kExponentShift);
    const __m256i exponents =
        _mm256_add_epi16(_mm256_and_si256(distances, codes), _mm256_set1_epi16(static_cast<int16_t>(lowest_)));
    return _mm256_or_si256(_mm256_and_si256(kept, mask), exponents);
  }

#else
  // The specification of the above.
  void decode(Pairs (&weights)[kCodedVectors]) const {
    unrolled<4>([&](auto i) {
      const auto words = [&](int vector) { return loaded<Half8>(at_ + vector * 64 + i * 16); };
      const Half8 even = words(0), odd = words(1), distances = words(2);
      weights[0].q[i] = joined(even, distances);
      weights[1].q[i] = joined(even << 8 | even >> 8, distances >> 4);
      weights[2].q[i] = joined(odd, distances >> 8);
      weights[3].q[i] = joined(odd << 8 | odd >> 8, distances >> 12);
    });
  }

  Word4 joined(Half8 kept, Half8 distances) const {
    return bits_as<Word4>((kept & kSignAndMantissa) | (((distances & (kCodes - 1)) << kExponentShift) + lowest_));
  }
#endif
  bf16 lowest_;
#endif
  const char* at_;
  const Repair* due_;
  int64_t step_;
};

}  // namespace quire
