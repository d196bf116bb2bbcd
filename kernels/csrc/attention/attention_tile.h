// The fixed pieces in which attention walks a sequence, and how one piece is handed to the arithmetic.
//
// Owns the sizes. Promises: which positions share a tile or a segment depends on the positions alone.
// Must not know: the pool's layout, the order of work.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/attention.h"
#include "simd/tiles.h"
#include "simd/unroll.h"

namespace quire {

constexpr int kTileUnits = 4;
constexpr int kTile = kTileUnits * kUnit;  // positions per step of the online softmax
constexpr int64_t kSegment = 512;  // positions whose partial result stands alone, so that workers may share a row

// Accumulators of one block of arithmetic: rows times vectors, as many as the registers hold. Few rows wait for memory,
// which is faster in long pieces.
constexpr int kBlockRows = kRegisters >= 8 ? 6 : 2, kBlockVecs = kRegisters >= 32 ? 4 : 1;
constexpr int value_vecs(int rows) {
  if (kRegisters >= 32) return rows <= 3 ? 8 : 4;
  return rows <= 2 ? 4 / rows : 1;
}

// Rows that share one piece of arithmetic: those of a block, or of as many tiles as the sums have.
#if defined(QUIRE_AMX)
constexpr int kMostGroupRows = 2 * kTileHeight;
#else
constexpr int kMostGroupRows = kBlockRows;
#endif

// One tile of one head: addresses of the units that some row sees.
struct Tile {
  const char* units[kTileUnits];
  int first_unit, last_unit;  // [first, last)
  bool has(int u) const { return u >= first_unit && u < last_unit; }
  // The same units of another head.
  Tile moved(int64_t bytes) const {
    Tile to = *this;
    for (int u = first_unit; u < last_unit; ++u) to.units[u] += bytes;
    return to;
  }
};

// Rows of a task that see a tile from the same position `low` on, each up to its own `high`, which never falls.
struct Group {
  int64_t first_row;
  int rows;  // at most Kv::kGroupRows
  int low;
  int high[kMostGroupRows];
  int first_unit() const { return low / kUnit; }
  int last_unit() const { return (high[rows - 1] + kUnit - 1) / kUnit; }
};

// The lanes [low, high) of a; `other` elsewhere, whatever a holds there.
inline Vec keep(Vec a, int low, int high, float other) {
  float lanes[kLanes];
  vstore(lanes, a);
  for (int i = 0; i < kLanes; ++i) lanes[i] = i >= low && i < high ? lanes[i] : other;
  return vload(lanes);
}

}  // namespace quire
