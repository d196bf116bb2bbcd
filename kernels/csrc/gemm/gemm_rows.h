// Where a product's activation rows lie, and which of them make up a tile.
//
// Each row is [steps][4 bytes]. Where products have parts (simd.h), the rows of a tile lie together instead, as [steps]
// [parts][rows of the tile][4 bytes]: two floats in place of a pair of bf16, two pairs of 16 bits in place of four
// bytes. Rows for int4 never do.
//
// Owns that layout. Must not know: packed weights, threads.
#pragma once

#include <algorithm>

#include "simd/simd.h"
#include "weights/linear.h"

namespace quire {

// 32 registers hold 6 x 4 sums, 4 weights and a broadcast, 8 hold 6 x 1, 1 and 1.
constexpr int kTileRows = kRegisters >= 8 ? 6 : 2;

// Activation rows in as few tiles as possible, as equal as possible: 8 rows are 4 + 4, 32 are 6 + 6 + 5 + 5 + 5 + 5.
struct Tiling {
  Tiling(int64_t m, int64_t limit) : count((m + limit - 1) / limit), base(m / count), larger(m % count) {}
  int64_t first(int64_t tile) const { return tile * base + std::min(tile, larger); }
  int64_t rows(int64_t tile) const { return base + (tile < larger ? 1 : 0); }
  // The tile of a row.
  int64_t of(int64_t row) const {
    const int64_t in_larger = larger * (base + 1);
    return row < in_larger ? row / (base + 1) : larger + (row - in_larger) / base;
  }

  int64_t count, base, larger;
};

// Where the rows' values are, `steps` of `kParts` parts.
template <int kParts>
struct Placing : Tiling {
  Placing(int64_t m, int64_t num_steps) : Tiling(m, kTileRows), steps(num_steps) {}

  // In bytes from the first row's first step.
  int64_t offset(int64_t tile, int64_t step) const {
    return first(tile) * steps * kStride + step * (kParts == 1 ? kStride : rows(tile) * kStride);
  }
  // From a tile's `offset`.
  template <int kRows>
  int64_t step_offset(int64_t step, int part, int row) const {
    return kParts == 1 ? row * steps * kStride + step * kStride : ((step * kParts + part) * kRows + row) * 4;
  }

  int64_t steps;

 private:
  static constexpr int64_t kStride = kParts * 4;  // of a row's step
};

template <typename Kind>
int64_t row_bytes(const Linear& w) {
  return w.k / Kind::kValuesPerStep * Kind::kParts * 4;
}

// Row `row` of `m`, whose steps are `x`, into its places in `data`. Only where steps have parts.
template <typename Kind>
void take_apart(const Linear& w, int64_t m, int64_t row, const char* x, char* data) {
  const int64_t steps = w.k / Kind::kValuesPerStep;
  const Placing<Kind::kParts> placing(m, steps);
  const int64_t tile = placing.of(row), rows = placing.rows(tile);
  char* to = data + placing.offset(tile, 0) + (row - placing.first(tile)) * 4;
  for (int64_t step = 0; step < steps; ++step, x += 4) {
    for (int part = 0; part < Kind::kParts; ++part, to += rows * 4) Kind::store_part(x, part, to);
  }
}

}  // namespace quire
