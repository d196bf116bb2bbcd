// The 16-bit float of activations and weights, the upper half of a float; and how many lanes every vector has.
//
// Promises: to_bf16 rounds to nearest, ties to even. Must not know: instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

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

}  // namespace quire
