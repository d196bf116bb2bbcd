// Where a product's activation rows lie, and which of them make up a tile.
//
// Each row is [steps][4 bytes]. Where products have parts (simd.h), the rows of a tile lie together instead, as [steps]
// [parts][rows of the tile][4 bytes]: two floats in place of a pair of bf16, two pairs of 16 bits in place of four
// bytes. Rows for int4 never do. Rows for the tile registers are blocks, see below.
//
// Owns that layout. Must not know: packed weights, threads.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd/simd.h"
#include "weights/linear.h"
#include "weights/stored.h"

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
  Placing(int64_t m, int64_t num_steps, int64_t limit = kTileRows) : Tiling(m, limit), steps(num_steps) {}

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

// Whether so many rows are multiplied by the tile registers. A k that ends with half of a tile's steps, which hardly
// any model has, is left to the others, unless its groups end there.
template <typename Kind>
bool takes_tiles(const Linear& w, int64_t m) {
  constexpr int64_t kDepth = Kind::kGrouped ? kGroup : kTileDepth * Kind::kValuesPerStep;
  return Kind::kTiledFrom > 0 && m >= Kind::kTiledFrom && w.k % kDepth == 0;
}

// Rows for the tile registers, in blocks of one or two tiles that are as equal as possible, since every new height is a
// new configuration. A block is [depth][height][64 bytes], zeros past a row's last step, and what it has past the last
// row is whatever is there: its sums are nobody's.
struct TileBlocks {
  TileBlocks(int64_t m, int64_t steps)
      : rows(m),
        depth((steps + kTileDepth - 1) / kTileDepth),
        count((m + 2 * kTileHeight - 1) / (2 * kTileHeight)),
        height((m + count - 1) / count),
        first(height <= kTileHeight ? height : (height + 1) / 2),
        second(height - first) {}

  int64_t bytes() const { return count * depth * height * kTileBytes; }
  // Of the block's slab of 16 steps.
  int64_t offset(int64_t block, int64_t slab) const { return (block * depth + slab) * height * kTileBytes; }
  // How many of the block's rows there are.
  int64_t live(int64_t block) const { return std::min(height, rows - block * height); }

  // Row `row`, whose steps are the `length` bytes at `x`, into its places in `data`.
  void place(int64_t row, const char* x, int64_t length, char* data) const {
    char* to = data + offset(row / height, 0) + row % height * kTileBytes;
    for (int64_t at = 0; at < length; at += kTileBytes, to += height * kTileBytes) {
      const auto size = static_cast<size_t>(std::min<int64_t>(kTileBytes, length - at));
      std::memcpy(to, x + at, size);
      std::memset(to + size, 0, kTileBytes - size);
    }
  }

  int64_t rows, depth, count, height;
  int64_t first, second;  // rows of a block's tiles; 0: it has but one
};

// Sums of a prepared row's groups, of four bytes each.
template <typename Kind>
int64_t sums_per_row(const Linear& w) {
  return Kind::kStored ? stored_groups(w) : w.k / kGroup;
}

template <typename Kind>
int64_t row_bytes(const Linear& w) {
  return w.k / Kind::kValuesPerStep * Kind::kParts * 4;
}

// Of `m` rows in their places.
template <typename Kind>
int64_t placed_bytes(const Linear& w, int64_t m) {
  return takes_tiles<Kind>(w, m) ? TileBlocks(m, w.k / Kind::kValuesPerStep).bytes() : m * row_bytes<Kind>(w);
}

// Whether the steps of one of `m` rows lie apart.
template <typename Kind>
bool lies_apart(const Linear& w, int64_t m) {
  return Kind::kParts > 1 || takes_tiles<Kind>(w, m);
}

// Row `row` of `m`, whose steps are `x`, into its places in `data`. Only where they lie apart.
template <typename Kind>
void take_apart(const Linear& w, int64_t m, int64_t row, const char* x, char* data) {
  const int64_t steps = w.k / Kind::kValuesPerStep;
  if (takes_tiles<Kind>(w, m)) return TileBlocks(m, steps).place(row, x, steps * 4, data);
  if constexpr (Kind::kParts > 1) {
    const Placing<Kind::kParts> placing(m, steps);
    const int64_t tile = placing.of(row), rows = placing.rows(tile);
    char* to = data + placing.offset(tile, 0) + (row - placing.first(tile)) * 4;
    for (int64_t step = 0; step < steps; ++step, x += 4) {
      for (int part = 0; part < Kind::kParts; ++part, to += rows * 4) Kind::store_part(x, part, to);
    }
  }
}

}  // namespace quire
