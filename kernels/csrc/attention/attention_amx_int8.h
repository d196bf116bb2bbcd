// The arithmetic of attention on int8 keys and values where there are tiles: many rows as products of tiles, few rows
// as everywhere.
//
// Promises: the results of Int8Kv, bit for bit: integer sums have no order, and what follows them is the same.
// Must not know: sequences, tables, the order of work.
#pragma once

#include "simd/tiles.h"

#if defined(QUIRE_AMX)

#include <cstring>

#include "attention/attention_int8.h"
#include "simd/prefetch.h"

namespace quire {

class AmxInt8Kv : public Int8Kv {
 public:
  static constexpr int kGroupRows = 2 * kTileHeight;
  struct Mode {
    TilesInUse tiles;
  };

  static int64_t scratch_bytes(int64_t rows, int64_t d) {
    return aligned_to_line(Int8Kv::scratch_bytes(rows, d)) + kSums * 4 + kTile * d + kTileUnits * kTileSize +
           rows * query_stride(d);
  }

  AmxInt8Kv(char* scratch, int64_t rows, int64_t d, float scale, Fetch fetch)
      : Int8Kv(scratch, rows, d, scale, fetch),
        quads_of_d_(d / 4),
        blocks_((quads_of_d_ + kTileDepth - 1) / kTileDepth),
        stride_(query_stride(d)),
        sums_(reinterpret_cast<int32_t*>(scratch + aligned_to_line(Int8Kv::scratch_bytes(rows, d)))),
        values_(reinterpret_cast<char*>(sums_ + kSums)),
        tails_(values_ + kTile * d),
        rows_of_tiles_(tails_ + kTileUnits * kTileSize) {
    if (quads_of_d_ % kTileDepth != 0) std::memset(tails_, 0, kTileUnits * kTileSize);
  }

  void set_query(int64_t row, const bf16* query) {
    Int8Kv::set_query(row, query);
    char* to = rows_of_tiles_ + row * stride_;
    for (int part = 0; part < 2; ++part, to += blocks_ * kTileBytes) {
      std::memcpy(to, queries_ + (2 * row + part) * d_, static_cast<size_t>(d_));
      std::memset(to + d_, 0, static_cast<size_t>(blocks_ * kTileBytes - d_));
    }
  }

  void open(const Tile& tile, const Tile& next) {
    bool other = tile.first_unit != first_unit_ || tile.last_unit != last_unit_;
    for (int u = tile.first_unit; u < tile.last_unit; ++u) other = other || units_[u] != tile.units[u];
    Int8Kv::open(tile, next);
    prefetches_ = next_[tile.first_unit] != units_[tile.first_unit];
    if (!other) return;
    first_unit_ = tile.first_unit;
    last_unit_ = tile.last_unit;
    packed_ = has_tails_ = false;
  }

  void score(const Group& group, float* s) {
    if (group.rows < kFewestInTiles) return Int8Kv::score(group, s);
    set_tails();
    configure(group);
    for (int u = group.first_unit(); u < group.last_unit(); ++u) {
      multiply_keys(u, group);
      const Vec scales = vload(scales_of(units_[u]));
      for (int r = 0; r < group.rows; ++r) {
        const float* header = headers_ + (group.first_row + r) * kHeader;
        int32_t offsets[2];
        std::memcpy(offsets, header + 1, sizeof(offsets));
        const Ints high = iadd(sums(r, 0), iset(offsets[0])), low = iadd(sums(r, 1), iset(offsets[1]));
        vstore(s + r * kTile + u * kUnit, vmul(joined(high, low), vmul(scales, vset(header[0]))));
      }
    }
  }

  // The units that the group does not see have weights too.
  void finish_weights(int row, int first, int last) {
    for (int part = 0; part < 2; ++part) {
      uint8_t* weights = weights_ + (2 * row + part) * kTile;
      std::memset(weights, 0, static_cast<size_t>(first * kUnit));
      std::memset(weights + last * kUnit, 0, static_cast<size_t>(kTile - last * kUnit));
    }
    Int8Kv::finish_weights(row, first, last);
  }

  void add_values(const Group& group, const float* fade, float* values, int64_t stride) {
    if (group.rows < kFewestInTiles) return Int8Kv::add_values(group, fade, values, stride);
    pack_values();
    configure(group);
    for (int64_t c = 0; c < d_; c += kTileWidth) {
      multiply_values(c, group.rows > kTileHeight);
      for (int r = 0; r < group.rows; ++r) {
        float* to = values + r * stride + c;
        const Vec kept = vmul(vload(to), vset(fade[r]));
        vstore(to, vfma(joined(sums(r, 0), sums(r, 1)), vset(steps_[r]), kept));
      }
    }
  }

 private:
  static constexpr int kFewestInTiles = 5;
  static constexpr int64_t kTileSize = kTileDepth * kTileBytes;
  static constexpr int64_t kSums = 2 * kGroupRows * kTileWidth;  // [high, low][rows][16]
  static_assert(kUnit == kTileWidth && kTile == kTileDepth * 4, "the positions of a tile are one block");

  static int64_t aligned_to_line(int64_t bytes) { return (bytes + kTileBytes - 1) / kTileBytes * kTileBytes; }
  // High and low bytes in whole blocks, and a line of the cache more, so that rows do not meet in its sets.
  static int64_t query_stride(int64_t d) { return 2 * aligned_to_line(d) + kTileBytes; }

  static void configure(const Group& group) {
    configure_tiles(std::min(group.rows, kTileHeight), std::max(group.rows - kTileHeight, 0));
  }

  Ints sums(int row, int part) const { return iload(sums_ + (part * kGroupRows + row) * kTileWidth); }

  // The tiles 0 and 1, the high and the low sums of up to 16 rows, and 2 and 3, those of the others.
  void store_sums(bool more_rows) const {
    constexpr int64_t kPart = kGroupRows * kTileWidth, kMore = kTileHeight * kTileWidth;
    tile_store<0>(sums_, kTileBytes);
    tile_store<1>(sums_ + kPart, kTileBytes);
    if (!more_rows) return;
    tile_store<2>(sums_ + kMore, kTileBytes);
    tile_store<3>(sums_ + kPart + kMore, kTileBytes);
  }

  static void clear_sums() {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  }

  // Where the last block of dimensions is not a whole one: copies of its keys, which zeros follow.
  void set_tails() {
    const int64_t done = quads_of_d_ / kTileDepth * kTileDepth, left = quads_of_d_ - done;
    if (left == 0 || has_tails_) return;
    for (int u = first_unit_; u < last_unit_; ++u) {
      std::memcpy(tails_ + u * kTileSize, units_[u] + done * kTileBytes, static_cast<size_t>(left * kTileBytes));
    }
    has_tails_ = true;
  }

  void multiply_keys(int unit, const Group& group) const {
    const bool more_rows = group.rows > kTileHeight;
    const char* queries = rows_of_tiles_ + group.first_row * stride_;
    const int64_t low = blocks_ * kTileBytes, more = kTileHeight * stride_;
    clear_sums();
    for (int64_t b = 0; b < blocks_; ++b, queries += kTileBytes) {
      const bool whole = (b + 1) * kTileDepth <= quads_of_d_;
      tile_load<6>(whole ? units_[unit] + b * kTileSize : tails_ + unit * kTileSize, kTileBytes);
      tile_load<4>(queries, stride_);
      tile_dot_s8u8<0, 4, 6>();
      tile_load<4>(queries + low, stride_);
      tile_dot_s8u8<1, 4, 6>();
      if (more_rows) {
        tile_load<5>(queries + more, stride_);
        tile_dot_s8u8<2, 5, 6>();
        tile_load<5>(queries + more + low, stride_);
        tile_dot_s8u8<3, 5, 6>();
      }
      if (prefetches_) prefetch<kTileSize>(next_[unit] + b * kTileSize);
    }
    store_sums(more_rows);
  }

  // The values of the open units as tiles, [d / 16][16 quads of positions][16][4]; the others are met by zeros alone.
  void pack_values() {
    if (packed_) return;
    for (int i = first_unit_ * kUnitQuads; i < last_unit_ * kUnitQuads; ++i) {
      for (int64_t c = 0; c < d_; c += kTileWidth) {
        istore(values_ + c * kTile + i * kTileBytes, iload(quads_[i] + 4 * c));
        if (prefetches_) __builtin_prefetch(next_quads_[i] + 4 * c);
      }
    }
    packed_ = true;
  }

  void multiply_values(int64_t column, bool more_rows) const {
    constexpr int64_t kRow = 2 * kTile, kMore = kTileHeight * kRow;
    clear_sums();
    tile_load<6>(values_ + column * kTile, kTileBytes);
    tile_load<4>(weights_, kRow);
    tile_dot_u8s8<0, 4, 6>();
    tile_load<4>(weights_ + kTile, kRow);
    tile_dot_u8s8<1, 4, 6>();
    if (more_rows) {
      tile_load<5>(weights_ + kMore, kRow);
      tile_dot_u8s8<2, 5, 6>();
      tile_load<5>(weights_ + kMore + kTile, kRow);
      tile_dot_u8s8<3, 5, 6>();
    }
    store_sums(more_rows);
  }

  const int64_t quads_of_d_, blocks_, stride_;  // of a head: quads, blocks, bytes from query to query
  int32_t* sums_;
  char* values_;         // of the tile, see pack_values
  char* tails_;          // [kTileUnits][16 quads][16][4]
  char* rows_of_tiles_;  // the queries: [rows][stride], high bytes and low ones in whole blocks
  int first_unit_ = 0, last_unit_ = 0;
  bool packed_ = false, has_tails_ = false, prefetches_ = false;
};

}  // namespace quire

#endif
