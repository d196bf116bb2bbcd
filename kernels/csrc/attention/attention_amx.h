// The arithmetic of attention on bf16 keys and values where there are tiles: many rows as products of tiles, few rows
// by fused products of vectors in the order of the tiles.
//
// A product of tiles takes 16 pairs: their first elements in a chain of fused products from zero, their second ones in
// another, then the sum of the two is added to what is there; denormals are zeros. So
//   a score is the sum over blocks of 32 dimensions, from the first dimension on;
//   an output is what was there times its factor, plus block after block of 32 positions, counted from the start of the
//   sequence: a tile of 64 positions has two, and no row, chunk, segment or window moves their bounds.
// Weights are bf16 as in Bf16Kv, and what they are divided by is the sum of the rounded ones; the shorter chains err no
// more than the long one there. A position that a row does not see has the weight zero, and a chain over zeros is what
// it was, but for the sign of a zero, which outputs therefore lose. Zero times what is not finite would be no zero:
// a tile with such values is left to the vectors, which pass over what a row does not see.
//
// Promises: a row's result does not depend on the number of rows in the group, nor on which of the two ways it went.
// Must not know: sequences, tables, the order of work.
#pragma once

#include "simd/tiles.h"

#if defined(QUIRE_AMX)

#include "attention/attention_order.h"
#include "attention/attention_tile.h"
#include "simd/prefetch.h"

namespace quire {

// Whether all numbers that it saw are finite.
class Finite {
 public:
  void see(Pairs a) { most_ = _mm512_max_epu16(most_, _mm512_and_si512(a.v, _mm512_set1_epi16(0x7fff))); }
  bool all() const {
    constexpr bf16 kInfinity = 0x7f80;
    bf16 lanes[2 * kLanes];
    pstore(lanes, Pairs{most_});
    return largest_magnitude(lanes, 2 * kLanes) < kInfinity;
  }

 private:
  __m512i most_ = _mm512_setzero_si512();
};

class AmxKv {
 public:
  static constexpr int kGroupRows = 2 * kTileHeight;
  static constexpr bool kKnowsBounds = true, kSignedZeros = false;
  struct Mode {
    DenormalsAreZeros floats;
    TilesInUse tiles;
  };

  static int64_t scratch_bytes(int64_t rows, int64_t d) {
    return 2 * d * 4 + (kGroupRows * kTile + kTile * d + kTileUnits * kBlock + rows * query_stride(d)) * 2;
  }

  AmxKv(char* scratch, int64_t rows, int64_t d, float scale, Fetch)
      : d_(d),
        steps_(d / 2),
        blocks_((steps_ + kTileDepth - 1) / kTileDepth),
        stride_(query_stride(d)),
        scale_(scale),
        weights_(reinterpret_cast<bf16*>(scratch + 2 * d * 4)),
        values_(weights_ + kGroupRows * kTile),
        tails_(values_ + kTile * d),
        queries_(tails_ + kTileUnits * kBlock),
        vectors_(d, scale, reinterpret_cast<uint32_t*>(scratch)) {
    (void)rows;
    if (steps_ % kTileDepth != 0) std::fill_n(tails_, kTileUnits * kBlock, bf16{0});
  }

  void set_query(int64_t row, const bf16* query) {
    bf16* to = queries_ + row * stride_;
    std::copy_n(query, d_, to);
    std::fill_n(to + d_, blocks_ * kBlockPositions - d_, bf16{0});
  }

  // The positions [low, high) of the tile are what some row of the task sees; the others may hold anything.
  void bound(int low, int high) {
    if (low == low_ && high == high_) return;
    low_ = low;
    high_ = high;
    packed_ = Packed::kNo;
    has_tails_ = false;
  }

  // The tile of the calls that follow, and the one after it, which they bring closer.
  void open(const Tile& tile, const Tile& next) {
    if (!vectors_.open(tile, next)) return;
    packed_ = Packed::kNo;
    has_tails_ = false;
  }

  // Scores of the group's units into s [rows][kTile], positions outside the group's included.
  void score(const Group& group, float* s) {
    const bf16* queries = queries_ + group.first_row * stride_;
    if (group.rows < kFewestInTiles) return vectors_.score(group, queries, stride_, s);
    set_tails();
    configure(group);
    for (int u = group.first_unit(); u < group.last_unit(); u += 2) {
      score_units(u, u + 1 < group.last_unit(), group.rows > kTileHeight, queries, s + u * kUnit);
    }
    for (int r = 0; r < group.rows; ++r) {
      for (int u = group.first_unit(); u < group.last_unit(); ++u) {
        float* of_unit = s + r * kTile + u * kUnit;
        vstore(of_unit, vmul(vload(of_unit), vset(scale_)));
      }
    }
  }

  // Turns the unit's weights of row `row` of the group into bf16 and returns them as they were rounded.
  // Those outside [low, high) become 0.
  Vec set_weights(int row, int unit, Vec weights, int low, int high) {
    if (low > 0 || high < kUnit) weights = keep(weights, low, high, 0.0f);
    return vstore_rounded(weights_ + row * kTile + unit * kUnit, weights);
  }

  // Blocks are two units: the one beside those that the group sees has weights too.
  void finish_weights(int row, int first, int last) {
    bf16* weights = weights_ + row * kTile;
    if (first % 2 != 0) std::fill_n(weights + (first - 1) * kUnit, kUnit, bf16{0});
    if (last % 2 != 0) std::fill_n(weights + last * kUnit, kUnit, bf16{0});
  }

  // values [rows][stride] = values * fade [rows] + weights * V.
  void add_values(const Group& group, const float* fade, float* values, int64_t stride) {
    if (group.rows >= kFewestInTiles && pack_values()) return add_packed(group, fade, values, stride);
    constexpr int kMost = OrderedVectors::kMostRows;
    for (int r = 0; r < group.rows; r += kMost) {
      vectors_.add_values(group, r, std::min(r + kMost, group.rows), weights_, fade, values, stride);
    }
  }

 private:
  static constexpr int kFewestInTiles = 5;
  static constexpr int64_t kBlock = kTileDepth * kTileBytes / 2;  // elements of a tile of keys or values
  static constexpr int kBlockPositions = 2 * kTileDepth;          // or dimensions
  static_assert(kUnit == kTileWidth && kTile % kBlockPositions == 0, "a tile has whole blocks");
  static_assert(kFewestInTiles <= OrderedVectors::kMostRows + 1, "who computes the scores of more rows");

  // Whole blocks, and a line of the cache more, so that rows do not meet in its sets.
  static int64_t query_stride(int64_t d) {
    return (d + kBlockPositions - 1) / kBlockPositions * kBlockPositions + kTileBytes / 2;
  }

  static void configure(const Group& group) {
    configure_tiles(std::min(group.rows, kTileHeight), std::max(group.rows - kTileHeight, 0));
  }

  // Where the last block of dimensions is half a one: copies of its keys, which zeros follow.
  void set_tails() {
    const int64_t done = steps_ / kTileDepth * kTileDepth, left = steps_ - done;
    if (left == 0 || has_tails_) return;
    for (int u = low_ / kUnit; u < (high_ + kUnit - 1) / kUnit; ++u) {
      std::copy_n(vectors_.keys(u) + done * 2 * kUnit, left * 2 * kUnit, tails_ + u * kBlock);
    }
    has_tails_ = true;
  }

  const bf16* key_block(int unit, int64_t block) const {
    return (block + 1) * kTileDepth <= steps_ ? vectors_.keys(unit) + block * kBlock : tails_ + unit * kBlock;
  }

  // Of one unit or two, for up to 16 rows or more: sums in the tiles 0 to 3.
  void score_units(int unit, bool two_units, bool more_rows, const bf16* queries, float* s) const {
    const int64_t bytes = stride_ * 2;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t b = 0; b < blocks_; ++b) {
      tile_load<4>(queries + b * kBlockPositions, bytes);
      tile_load<6>(key_block(unit, b), kTileBytes);
      tile_dot_bf16<0, 4, 6>();
      if (two_units) {
        tile_load<7>(key_block(unit + 1, b), kTileBytes);
        tile_dot_bf16<1, 4, 7>();
      }
      if (more_rows) {
        tile_load<5>(queries + kTileHeight * stride_ + b * kBlockPositions, bytes);
        tile_dot_bf16<2, 5, 6>();
        if (two_units) tile_dot_bf16<3, 5, 7>();
      }
      if (vectors_.prefetches()) {
        prefetch<kBlock * 2>(vectors_.next_keys(unit) + b * kBlock);
        if (two_units) prefetch<kBlock * 2>(vectors_.next_keys(unit + 1) + b * kBlock);
      }
    }
    constexpr int64_t kRowBytes = kTile * 4;
    float* more = s + kTileHeight * kTile;
    tile_store<0>(s, kRowBytes);
    if (two_units) tile_store<1>(s + kUnit, kRowBytes);
    if (more_rows) tile_store<2>(more, kRowBytes);
    if (more_rows && two_units) tile_store<3>(more + kUnit, kRowBytes);
  }

  // The values that the task sees as tiles, [d / 16][blocks][16 pairs][16][2], with zeros for the others: a block's
  // units need not lie side by side. False if a value is not finite.
  bool pack_values() {
    if (packed_ != Packed::kNo) return packed_ == Packed::kYes;
    Finite finite;
    const int end = (high_ + kBlockPositions - 1) / kBlockPositions * kTileDepth;
    for (int pair = low_ / kBlockPositions * kTileDepth; pair < end; ++pair) {
      const auto seen = [&](int position) { return position >= low_ && position < high_; };
      const uint32_t kept = (seen(2 * pair) ? 0x0000ffffu : 0) | (seen(2 * pair + 1) ? 0xffff0000u : 0);
      bf16* to = values_ + pair / kTileDepth * kBlock + pair % kTileDepth * 2 * kTileWidth;
      if (kept == 0) {
        for (int64_t c = 0; c < d_; c += kTileWidth) pstore(to + c * kTile, Pairs{_mm512_setzero_si512()});
      } else {
        pack_pair(pair, kept, to, &finite);
      }
    }
    packed_ = finite.all() ? Packed::kYes : Packed::kNotFinite;
    return packed_ == Packed::kYes;
  }

  void pack_pair(int pair, uint32_t kept, bf16* to, Finite* finite) const {
    const bf16 *from = vectors_.values(pair), *next = vectors_.next_values(pair);
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(kept));
    for (int64_t c = 0; c < d_; c += kTileWidth) {
      const Pairs x{_mm512_and_si512(pload(from + 2 * c).v, mask)};
      finite->see(x);
      pstore(to + c * kTile, x);
      if (vectors_.prefetches()) __builtin_prefetch(next + 2 * c, 0, 2);
    }
  }

  void add_packed(const Group& group, const float* fade, float* values, int64_t stride) const {
    for (int r = 0; r < group.rows; ++r) {
      if (fade[r] == 1.0f) continue;
      float* row = values + r * stride;
      for (int64_t c = 0; c < d_; c += kLanes) vstore(row + c, vmul(vload(row + c), vset(fade[r])));
    }
    configure(group);
    const int begin = group.first_unit() / 2, end = (group.last_unit() + 1) / 2;
    for (int64_t c = 0; c < d_; c += 2 * kTileWidth) {
      add_columns(begin, end, c, c + kTileWidth<d_, group.rows> kTileHeight, values + c, stride);
    }
  }

  // The blocks [begin, end) of positions, of 16 or 32 dimensions from `column` on, for up to 16 rows or more.
  void add_columns(int begin, int end, int64_t column, bool two_columns, bool more_rows, float* values,
                   int64_t stride) const {
    const int64_t bytes = stride * 4;
    float* more = values + kTileHeight * stride;
    tile_load<0>(values, bytes);
    if (two_columns) tile_load<1>(values + kTileWidth, bytes);
    if (more_rows) tile_load<2>(more, bytes);
    if (more_rows && two_columns) tile_load<3>(more + kTileWidth, bytes);
    for (int b = begin; b < end; ++b) {
      const bf16 *weights = weights_ + b * kBlockPositions, *x = values_ + column * kTile + b * kBlock;
      tile_load<4>(weights, kTile * 2);
      tile_load<6>(x, kTileBytes);
      tile_dot_bf16<0, 4, 6>();
      if (two_columns) {
        tile_load<7>(x + kTileWidth * kTile, kTileBytes);
        tile_dot_bf16<1, 4, 7>();
      }
      if (more_rows) {
        tile_load<5>(weights + kTileHeight * kTile, kTile * 2);
        tile_dot_bf16<2, 5, 6>();
        if (two_columns) tile_dot_bf16<3, 5, 7>();
      }
    }
    tile_store<0>(values, bytes);
    if (two_columns) tile_store<1>(values + kTileWidth, bytes);
    if (more_rows) tile_store<2>(more, bytes);
    if (more_rows && two_columns) tile_store<3>(more + kTileWidth, bytes);
  }

  enum class Packed { kNo, kYes, kNotFinite };

  const int64_t d_, steps_, blocks_, stride_;  // of a head: dimensions, pairs, blocks, elements from query to query
  const float scale_;
  bf16* weights_;  // [kGroupRows][kTile]
  bf16* values_;   // of the tile, see pack_values
  bf16* tails_;    // [kTileUnits][16 steps][16][2]
  bf16* queries_;  // [rows][stride], zeros after d
  int low_ = 0, high_ = 0;
  Packed packed_ = Packed::kNo;
  bool has_tails_ = false;
  OrderedVectors vectors_;
};

}  // namespace quire

#endif
