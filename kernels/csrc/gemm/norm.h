// Rows before and between products: RMS norm or layer norm, quantisation to bytes, a gate.
//
// Owns the arithmetic of one row. Promises: a row's result depends on that row alone. Must not know: threads, weights.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd/simd.h"

namespace quire {

// x / sqrt(mean(x^2) + eps) times a weight [n]: bf16, which multiplies the rounded quotient, or float, which multiplies
// before the only rounding. A centred norm, whose weight is float, is that of x - mean(x).
struct Norm {
  const void* weight;
  float eps;
  int32_t as_float, centred;
};

// out[0, n) = the normed x, in bf16.
void norm_row(const bf16* x, const Norm& norm, int64_t n, bf16* out);

// residual[0, n) = (residual + the normed y, which is rounded to bf16 first) * scale.
void norm_add_row(const bf16* y, const Norm& norm, int64_t n, float scale, bf16* residual);

// x[0, n) *= sigmoid(gate).
void mul_sigmoid_row(const bf16* gate, int64_t n, bf16* x);

// An activation row before it is prepared.
struct RawRow {
  const bf16* x;     // [n]
  const Norm* norm;  // or null: none
  int64_t n;

  // What is to be prepared: `into`, now normed, or x itself.
  const bf16* normed(bf16* into) const {
    if (norm == nullptr) return x;
    norm_row(x, *norm, n, into);
    return into;
  }
};

// Sixteen values of a row, zeros past its end.
inline Vec load_row(const bf16* x, int64_t at, int64_t n) {
  if (at + kLanes <= n) return vload_bf16(x + at);
  bf16 lanes[kLanes] = {};
  if (at < n) std::memcpy(lanes, x + at, static_cast<size_t>(n - at) * sizeof(bf16));
  return vload_bf16(lanes);
}

// Symmetric quantisation of x[0, n) to n integers of -127..127 and one scale, written from out[0] on; out[n, padded) is
// filled with zeros' code. Returns the scale; NaN or infinity anywhere in x makes it NaN.
float quantize_row_unsigned(const bf16* x, int64_t n, int64_t padded, uint8_t* out);  // code: value + 128

// As above with plain signed codes; group_sums[padded / 32] gets 8 times the sum of every 32 codes.
float quantize_row_signed(const bf16* x, int64_t n, int64_t padded, int8_t* out, int32_t* group_sums);

}  // namespace quire
