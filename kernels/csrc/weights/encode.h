// bf16 weights into the coded panels of coded.h.
//
// Promises: decoding gives the same bits. Must not know: where a panel lies, how it is read.
#pragma once

#include <algorithm>

#include "weights/coded.h"

namespace quire {

inline int exponent(bf16 weight) { return weight >> kExponentShift & 0xff; }

// Counts the exponents of a panel, or of a fair part of it, and says which sixteen in a row cover most.
class ExponentCounts {
 public:
  void add(bf16 weight) { ++counts_[exponent(weight)]; }

  int lowest() const {
    int covered = 0;
    for (int e = 0; e < kCodes; ++e) covered += counts_[e];
    int best = 0, most = covered;
    for (int low = 1; low + kCodes <= kExponents; ++low) {
      covered += counts_[low + kCodes - 1] - counts_[low - 1];
      if (covered > most) {
        best = low;
        most = covered;
      }
    }
    return best;
  }

 private:
  static constexpr int kExponents = 256;
  int counts_[kExponents] = {};
};

inline bool within(bf16 weight, int lowest) { return static_cast<unsigned>(exponent(weight) - lowest) < kCodes; }

// 128 weights -> 192 bytes. Weights whose exponent is out of reach come back as something else.
inline void encode_step(const bf16* weights, int lowest, void* out) {
  bf16 words[3][kCodedWords];
  for (int i = 0; i < kCodedWords; ++i) {
    const auto kept = [&](int v) { return static_cast<unsigned>(weights[v * kCodedWords + i] & kSignAndMantissa); };
    const auto distance = [&](int v) {
      return static_cast<unsigned>(exponent(weights[v * kCodedWords + i]) - lowest) % kCodes;
    };
    // The odd vector's sixteen bits with their bytes exchanged fill the places that the even vector's exponent leaves.
    const auto exchanged = [](unsigned word) { return word >> 8 | word << 8; };
    words[0][i] = static_cast<bf16>(kept(0) | exchanged(kept(1)));
    words[1][i] = static_cast<bf16>(kept(2) | exchanged(kept(3)));
    words[2][i] = static_cast<bf16>(distance(0) | distance(1) << 4 | distance(2) << 8 | distance(3) << 12);
  }
  std::memcpy(out, words, sizeof(words));
}

// A panel of `steps` [128] -> out, which must have room for what `within` leaves over.
inline void encode_panel(const bf16* weights, int64_t steps, int lowest, int32_t repairs, char* out) {
  auto* header = reinterpret_cast<CodedHeader*>(out);
  std::memset(out, 0, static_cast<size_t>(CodedHeader::size(repairs)));
  header->lowest = lowest;
  header->repairs = repairs;
  Repair* repair = header->first;
  out += CodedHeader::size(repairs);
  for (int64_t step = 0; step < steps; ++step, weights += kCodedStepWeights, out += kCodedStepBytes) {
    encode_step(weights, lowest, out);
    int beyond = 0;
    for (int i = 0; i < kCodedStepWeights; ++i) beyond += within(weights[i], lowest) ? 0 : 1;
    if (beyond == 0) continue;
    for (int i = 0; i < kCodedStepWeights; ++i) {
      if (!within(weights[i], lowest)) {
        *repair++ = {static_cast<int32_t>(step), static_cast<uint16_t>(i), weights[i]};
      }
    }
  }
  *repair = {INT32_MAX, 0, 0};
}

}  // namespace quire
