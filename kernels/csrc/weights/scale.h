// The scale of an int4 group in one byte: sign, three bits of exponent, four of mantissa; 2^-7 to 1.9375, and no zero.
//
// Promises: scale_of(scale_code(x)) is the nearest such number. Must not know: groups, what a scale is relative to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace quire {

constexpr int kScaleShift = 19;                 // from the byte's lowest bit to the float's of the same weight
constexpr uint32_t kScaleBits = 0x83f80000;     // of a float, those that the byte tells
constexpr uint32_t kScaleLeast = 0x3c000000;    // 2^-7
constexpr uint32_t kScaleLargest = 0x3ff80000;  // 1.9375

inline float scale_of(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
  const uint32_t bits = sign | static_cast<uint32_t>(code & 0x7f) << kScaleShift | kScaleLeast;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return scale;
}

// Ties to even; what is out of range becomes the least or the largest. Not for NaN.
inline uint8_t scale_code(float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, 4);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t rounded = magnitude + (1u << (kScaleShift - 1)) - 1 + (magnitude >> kScaleShift & 1);
  const uint32_t bounded = std::min(std::max(rounded, kScaleLeast), kScaleLargest);
  return static_cast<uint8_t>(bits >> 24 & 0x80) | static_cast<uint8_t>(bounded >> kScaleShift & 0x7f);
}

}  // namespace quire
