// A matrix on its way into panels: which of its rows a lane takes, and what packing a panel writes.
//
// Promises: a panel alone. Must not know: kinds of weights, files, which layer a matrix is from.
#pragma once

#include <cstring>

#include "weights/linear.h"

namespace quire {

struct Source {
  const bf16* rows;   // [n, columns], or the gate of a gate-up pair
  const bf16* above;  // gate-up: the up matrix, else null
};

// A matrix of a kind of weights/stored.h as it comes: [n, columns] codes in a byte each, and in the matrix's forms
// scales and offsets [n, groups], with their units [n, spans of 256 columns] if they have any.
struct StoredRows {
  const uint8_t* codes;
  const void* scales;
  const uint16_t* scale_units;
  const void* offsets;
  const uint16_t* offset_units;
};

// The row of a matrix in a lane of a panel, -1 past the last one; `of_above`: of the up matrix.
struct RowPlace {
  RowPlace(const Linear& w, int64_t panel, int64_t lane) {
    constexpr int64_t kHalf = kPanelRows / 2;
    row = w.gate_up ? panel * kHalf + lane % kHalf : panel * kPanelRows + lane;
    of_above = w.gate_up && lane >= kHalf;
    if (row >= (w.gate_up ? w.n / 2 : w.n)) row = -1;
  }
  int64_t row;
  bool of_above;
};

// The matrix row in a lane of a panel, or null past the last one.
inline const bf16* source_row(const Linear& w, const Source& from, int64_t panel, int64_t lane) {
  const RowPlace place(w, panel, lane);
  if (place.row < 0) return nullptr;
  return (place.of_above ? from.above : from.rows) + place.row * w.columns;
}

// What packing one panel fills.
struct Panel {
  char* weights;
  float* scales;  // [64], if its kind has any
  int32_t* sums;  // [64], likewise
};

// rows [64][steps] of four bytes -> out [steps][64]. In blocks, so that the lines being written stay in the cache.
inline void transpose(const char* rows, int64_t steps, char* out) {
  constexpr int64_t kBlock = 16;
  for (int64_t first = 0; first < steps; first += kBlock) {
    const int64_t last = first + kBlock < steps ? first + kBlock : steps;
    for (int64_t lane = 0; lane < kPanelRows; ++lane) {
      for (int64_t step = first; step < last; ++step) {
        std::memcpy(out + (step * kPanelRows + lane) * 4, rows + (lane * steps + step) * 4, 4);
      }
    }
  }
}

}  // namespace quire
