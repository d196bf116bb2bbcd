// A packed matrix: 64 output rows to a panel, of each kind of weight.
//
// Owns the geometry that all kinds share. Promises: a panel is contiguous, begins at a multiple of 64 bytes and needs
// nothing of another. Must not know: what lies in a panel, who computes which.
#pragma once

#include <cstdint>

namespace quire {

constexpr int kPanelRows = 64;

enum class WeightKind : int32_t { kBf16 = 0, kInt8 = 1, kInt4 = 2 };

// `gate_up`: a panel holds 32 gate rows, then the 32 up rows that belong to them, and n counts both.
struct Linear {
  WeightKind kind;
  int32_t gate_up;
  int64_t n, k;     // k: padded with zeros to a multiple of 32
  int64_t columns;  // k before padding
  const char* packed;
  const int64_t* starts;  // [panels + 1], of the panels and of their end, in bytes; multiples of 64
  const float* scales;  // int8, int4: [panels * 64], per output row, in panel order; those of int4 groups are relative
  const int32_t* sums;  // int8: [panels * 64], 128 * the sum of the row's weights
  const float* bias;    // [panels * 64] in panel order, or null
};

inline int64_t panel_count(const Linear& w) {
  const int64_t step = w.gate_up ? kPanelRows / 2 : kPanelRows;
  const int64_t rows = w.gate_up ? w.n / 2 : w.n;
  return (rows + step - 1) / step;
}

inline const char* panel_at(const Linear& w, int64_t panel) { return w.packed + w.starts[panel]; }

}  // namespace quire
