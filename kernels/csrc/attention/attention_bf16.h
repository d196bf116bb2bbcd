// The arithmetic of attention on bf16 keys and values: products of bf16 pairs, sums in fp32.
//
// Promises: a score is one sum over the dimensions in order, an output one sum over the positions in order, whatever
// the number of rows in the block; what lies outside a row's positions is never an operand (0 * NaN is not 0).
// Must not know: sequences, tables, the order of work.
#pragma once

#include <cstring>

#include "attention/attention_tile.h"
#include "simd/prefetch.h"

namespace quire {

class Bf16Kv {
 public:
  static constexpr int kGroupRows = kBlockRows;
  static constexpr bool kKnowsBounds = false, kSignedZeros = true;
  struct Mode {};

  static int64_t scratch_bytes(int64_t rows, int64_t d) {
    return (rows * d + kBlockRows * kTile) * static_cast<int64_t>(sizeof(PairFactor)) + 2 * d * 4;
  }

  Bf16Kv(char* scratch, int64_t rows, int64_t d, float scale, Fetch)
      : d_(d),
        scale_(scale),
        edges_(reinterpret_cast<uint32_t*>(scratch)),
        weights_(reinterpret_cast<PairFactor*>(scratch + 2 * d * 4)),
        queries_(weights_ + kBlockRows * kTile) {
    (void)rows;
  }

  void set_query(int64_t row, const bf16* query) {
    for (int64_t i = 0; i < d_; i += kLanes) store_factors(queries_ + row * d_ + i, vload_bf16(query + i));
  }

  // The tile of the calls that follow, and the one after it, which they bring closer.
  void open(const Tile& tile, const Tile& next) {
    for (int u = tile.first_unit; u < tile.last_unit; ++u) {
      keys_[u] = reinterpret_cast<const bf16*>(tile.units[u]);
      next_keys_[u] = next.has(u) ? reinterpret_cast<const bf16*>(next.units[u]) : keys_[u];
      for (int i = 0; i < kUnitPairs; ++i) {
        const int64_t at = (kUnit + 2 * i) * d_;
        pairs_[u * kUnitPairs + i] = keys_[u] + at;
        next_pairs_[u * kUnitPairs + i] = next_keys_[u] + at;
      }
    }
  }

  // Scores of the group's units into s [rows][kTile], positions outside the group's included.
  void score(const Group& group, float* s) const {
    const PairFactor* queries = queries_ + group.first_row * d_;
    for (int u = group.first_unit(); u < group.last_unit(); u += kBlockVecs) {
      with_count<kBlockRows>(group.rows, [&](auto rows) {
        with_count<kBlockVecs>(std::min(kBlockVecs, group.last_unit() - u),
                               [&](auto vecs) { score_block<rows.value, vecs.value>(u, queries, s + u * kUnit); });
      });
    }
  }

  // Turns the unit's weights of row `row` of the group into bf16 and returns them as they were rounded.
  // Those outside [low, high) become 0.
  Vec set_weights(int row, int unit, Vec weights, int low, int high) {
    if (low > 0 || high < kUnit) weights = keep(weights, low, high, 0.0f);
    return store_factors(weights_ + row * kTile + unit * kUnit, weights);
  }

  void finish_weights(int, int, int) {}

  // values [rows][stride] = values * fade [rows] + weights * V.
  void add_values(const Group& group, const float* fade, float* values, int64_t stride) {
    const int shared = group.high[0] / 2 * 2;  // whole pairs that every row sees
    if (group.high[group.rows - 1] == group.high[0]) {
      return add_range(0, group.rows, group.low, group.high[0], fade, values, stride);
    }
    // All rows together as far as they go together, then the rows of each position alone.
    const bool together = shared > group.low;
    if (together) add_range(0, group.rows, group.low, shared, fade, values, stride);
    float ones[kBlockRows];
    std::fill_n(ones, kBlockRows, 1.0f);
    for (int r = 0, end; r < group.rows; r = end) {
      for (end = r + 1; end < group.rows && group.high[end] == group.high[r];) ++end;
      const int low = together ? shared : group.low;
      if (low < group.high[r]) add_range(r, end, low, group.high[r], together ? ones : fade, values, stride);
    }
  }

 private:
  static constexpr int kUnitPairs = kUnit / 2;

  // The rows [first, last) of the block and the positions [low, high) of the tile.
  void add_range(int first, int last, int low, int high, const float* fade, float* values, int64_t stride) {
    const int begin = low / 2, end = (high + 1) / 2;
    const bf16 *first_pair = pairs_[begin], *last_pair = pairs_[end - 1];
    if (low % 2 != 0) pairs_[begin] = edge(first_pair, 0xffff0000u, edges_);
    if (high % 2 != 0) pairs_[end - 1] = edge(last_pair, 0x0000ffffu, edges_ + d_);
    const int vecs = static_cast<int>(d_ / kLanes);
    with_count<kBlockRows>(last - first, [&](auto rows) {
      constexpr int kMost = value_vecs(rows);
      for (int v = 0; v < vecs; v += kMost) {
        with_count<kMost>(std::min(kMost, vecs - v), [&](auto count) {
          value_block<rows.value, count.value>(first, begin, end, v * kLanes, fade + first, values + first * stride,
                                               stride);
        });
      }
    });
    pairs_[end - 1] = last_pair;
    pairs_[begin] = first_pair;
  }

  template <int kRows, int kVecs>
  void score_block(int unit, const PairFactor* queries, float* s) const {
    const bf16 *const *keys = keys_ + unit, *const *next = next_keys_ + unit;
    Vec acc[kRows][kVecs];
    unrolled<kRows>([&](auto r) { unrolled<kVecs>([&](auto v) { acc[r][v] = vzero(); }); });
    for (int64_t i = 0; i < d_; i += 2) {
      Pairs k[kVecs];
      unrolled<kVecs>([&](auto v) {
        k[v] = pload(keys[v] + i * kUnit);
        __builtin_prefetch(next[v] + i * kUnit, 0, 2);
      });
      unrolled<kPairParts>([&](auto part) {
        PairPart w[kVecs];
        unrolled<kVecs>([&](auto v) { w[v] = pair_part<part>(k[v]); });
        unrolled<kRows>([&](auto r) {
          const PairPart q = pair_factor(queries + r * d_ + i + part);
          unrolled<kVecs>([&](auto v) { acc[r][v] = pair_product(acc[r][v], w[v], q); });
        });
      });
    }
    unrolled<kRows>([&](auto r) {
      unrolled<kVecs>([&](auto v) { vstore(s + r * kTile + v * kUnit, vmul(acc[r][v], vset(scale_))); });
    });
  }

  template <int kRows, int kVecs>
  void value_block(int row, int begin, int end, int64_t column, const float* fade, float* values,
                   int64_t stride) const {
    Vec acc[kRows][kVecs];
    unrolled<kRows>([&](auto r) {
      unrolled<kVecs>(
          [&](auto v) { acc[r][v] = vmul(vload(values + r * stride + column + v * kLanes), vset(fade[r])); });
    });
    const PairFactor* weights = weights_ + row * kTile;
    for (int64_t i = begin; i < end; ++i) {
      const bf16 *pair = pairs_[i] + 2 * column, *next = next_pairs_[i] + 2 * column;
      unrolled<kPairParts>([&](auto part) {
        const auto factor = [&](auto r) { return pair_factor(weights + r * kTile + 2 * i + part); };
        PairPart w[kRows];  // of a single vector, it is the values that stay in a register
        if constexpr (kVecs > 1) unrolled<kRows>([&](auto r) { w[r] = factor(r); });
        unrolled<kVecs>([&](auto v) {
          const PairPart x = pair_part<part>(pload(pair + v * 2 * kLanes));
          if constexpr (part == 0) __builtin_prefetch(next + v * 2 * kLanes, 0, 2);
          unrolled<kRows>([&](auto r) { acc[r][v] = pair_product(acc[r][v], x, kVecs > 1 ? w[r] : factor(r)); });
        });
      });
    }
    unrolled<kRows>([&](auto r) {
      unrolled<kVecs>([&](auto v) { vstore(values + r * stride + column + v * kLanes, acc[r][v]); });
    });
  }

  // A copy of a pair of value rows with one of the two zeroed.
  const bf16* edge(const bf16* pair, uint32_t mask, uint32_t* to) const {
    for (int64_t i = 0; i < d_; ++i) {
      uint32_t both;
      std::memcpy(&both, pair + 2 * i, 4);
      to[i] = both & mask;
    }
    return reinterpret_cast<const bf16*>(to);
  }

  const int64_t d_;
  const float scale_;
  uint32_t* edges_;      // [2][d]
  PairFactor* weights_;  // [kBlockRows][kTile]
  PairFactor* queries_;  // [rows][d]
  const bf16* keys_[kTileUnits] = {};
  const bf16* pairs_[kTile / 2] = {};  // values of two positions each
  // The same of the next tile, which is fetched while this one is used: a tile ahead, since less than that is used
  // before it has come.
  const bf16* next_keys_[kTileUnits] = {};
  const bf16* next_pairs_[kTile / 2] = {};
};

}  // namespace quire
