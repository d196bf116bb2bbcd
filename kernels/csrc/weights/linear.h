// A packed matrix, and the activation rows that meet it in a product.
//
// Owns the geometry that all kinds of weights share: panels of 64 output rows, each [steps][64][4 bytes] or, for int4,
// groups of such steps; a lane is an output row. Promises: a panel is contiguous, begins at a multiple of 64 bytes and
// needs nothing of another. Must not know: what a step's bytes mean, who computes which panel.
#pragma once

#include <cstdint>

#include "simd/bf16.h"

namespace quire {

constexpr int kPanelRows = 64;
constexpr int kVecs = kPanelRows / kLanes;  // vectors of a step, and accumulators per activation row
constexpr int64_t kStepBytes = kPanelRows * 4;
constexpr int kGroup = 32;  // k values that share one int4 scale; k is padded to a multiple of it

// Each has its traits, which kinds.h lists.
enum class WeightKind : int32_t {
  kBf16 = 0,
  kInt8 = 1,
  kInt4 = 2,
  kNibbles = 3,
  kBytes = 4,
  kE4m3 = 5,
  kSixBits = 6,
  kStacked = 7,  // rows of several of the four kinds before, see `Linear::parts`
};

constexpr int kMostParts = 4;

// Of the kinds that others quantised: fp16, bf16, float, or a signed byte times an fp16 unit for 256 columns; of
// offsets also a signed byte of which the code is taken before it is scaled.
enum class ScaleForm : int32_t { kHalf = 0, kBf16 = 1, kFloat = 2, kUnits = 3 };
enum class OffsetForm : int32_t { kNone = 0, kZeroPoint = 1, kHalf = 2, kBf16 = 3, kFloat = 4, kUnits = 5 };

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
  // Of kinds that others quantised (stored.h).
  int64_t group;  // columns that share a scale: 16, or a multiple of 32
  ScaleForm scale_form;
  OffsetForm offset_form;
  const bf16* table;  // nibbles: [32], of 16 values, twice
  // Stacked: matrices that others quantised, one below the other; all but the last have whole panels. The whole has
  // their sizes together and the bias, a part what else belongs to its kind.
  const Linear* parts;
  int64_t num_parts;  // at most kMostParts
};

// Activation rows as the weights want them.
struct Rows {
  int64_t m;
  const void* data;     // bf16, or for int8 bytes offset by 128, as gemm_rows.h places them; int4: signed bytes [m, k]
  const float* scales;  // int8, int4: [m]
  const int32_t* sums;  // int4: [m, k / 32], 8 * the sum of the group; kinds of stored.h: floats, the groups' sums
};

inline int64_t panel_count(const Linear& w) {
  const int64_t step = w.gate_up ? kPanelRows / 2 : kPanelRows;
  const int64_t rows = w.gate_up ? w.n / 2 : w.n;
  return (rows + step - 1) / step;
}

inline const char* panel_at(const Linear& w, int64_t panel) { return w.packed + w.starts[panel]; }

}  // namespace quire
