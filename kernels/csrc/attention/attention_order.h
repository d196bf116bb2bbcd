// Attention of few rows on bf16 keys and values by vectors, in the order in which the tiles of AMX add; what that order
// is tells attention_amx.h.
//
// Owns the addresses of the open tile. Promises: a row's sums do not depend on the number of rows; what lies outside a
// row's positions is never an operand. Must not know: sequences, tables, tiles.
#pragma once

#include "simd/tiles.h"

#if defined(QUIRE_AMX)

#include <cstring>

#include "attention/attention_tile.h"

namespace quire {

template <int kRows, int kVecs>
struct BlockSums {
  Vec at[kRows][kVecs];

  // Adds the pairs [begin, end) of one block: a row's factors, `stride` elements from row to row, times load(pair, v).
  template <typename Load>
  void add(int64_t begin, int64_t end, const bf16* factors, int64_t stride, const Load& load) {
    Vec even[kRows][kVecs], odd[kRows][kVecs];
    unrolled<kRows>([&](auto r) { unrolled<kVecs>([&](auto v) { even[r][v] = odd[r][v] = vzero(); }); });
    for (int64_t i = begin; i < end; ++i) {
      Pairs x[kVecs];
      unrolled<kVecs>([&](auto v) { x[v] = load(i, v); });
      add_values<0>(x, factors + 2 * i, stride, even);
      add_values<1>(x, factors + 2 * i, stride, odd);
    }
    unrolled<kRows>(
        [&](auto r) { unrolled<kVecs>([&](auto v) { at[r][v] = vadd(at[r][v], vadd(even[r][v], odd[r][v])); }); });
  }

 private:
  template <int kPart>
  QUIRE_BLOCK inline static void add_values(const Pairs (&x)[kVecs], const bf16* factors, int64_t stride,
                                            Vec (&acc)[kRows][kVecs]) {
    Vec w[kVecs];
    unrolled<kVecs>([&](auto v) { w[v] = pair_values<kPart>(x[v]); });
    unrolled<kRows>([&](auto r) {
      const Vec factor = pair_values<kPart>(pset(factors + r * stride));
      unrolled<kVecs>([&](auto v) { acc[r][v] = fused(acc[r][v], w[v], factor); });
    });
  }
};

class OrderedVectors {
 public:
  static constexpr int kMostRows = 4;
  static constexpr int64_t kPairs = kTileDepth;  // of a block

  // `edges`: memory for [2][d].
  OrderedVectors(int64_t d, float scale, uint32_t* edges) : d_(d), scale_(scale), edges_(edges) {}

  // The tile of the calls that follow, and the one after it, which they bring closer. False if the units are those that
  // were open before.
  bool open(const Tile& tile, const Tile& next) {
    bool other = false;
    prefetches_ = false;
    for (int u = tile.first_unit; u < tile.last_unit; ++u) {
      const bf16* keys = reinterpret_cast<const bf16*>(tile.units[u]);
      other = other || keys != keys_[u];
      keys_[u] = keys;
      next_keys_[u] = next.has(u) ? reinterpret_cast<const bf16*>(next.units[u]) : keys;
      prefetches_ = prefetches_ || next_keys_[u] != keys;
      for (int i = 0; i < kUnitPairs; ++i) {
        const int64_t at = (kUnit + 2 * i) * d_;
        pairs_[u * kUnitPairs + i] = keys + at;
        next_pairs_[u * kUnitPairs + i] = next_keys_[u] + at;
      }
    }
    return other;
  }

  // The keys of a unit, and the pair of value rows of two positions of the tile; the same of the next tile, unless
  // there is nothing to bring.
  const bf16* keys(int unit) const { return keys_[unit]; }
  const bf16* next_keys(int unit) const { return next_keys_[unit]; }
  const bf16* values(int pair) const { return pairs_[pair]; }
  const bf16* next_values(int pair) const { return next_pairs_[pair]; }
  bool prefetches() const { return prefetches_; }

  // Scores of the group's units into s [rows][kTile], positions outside the group's included. Queries [rows][stride].
  void score(const Group& group, const bf16* queries, int64_t stride, float* s) const {
    with_count<kMostRows>(group.rows, [&](auto rows) {
      constexpr int kMost = rows <= 2 ? 4 : 2;
      for (int u = group.first_unit(); u < group.last_unit(); u += kMost) {
        with_count<kMost>(std::min(kMost, group.last_unit() - u),
                          [&](auto vecs) { score_block<rows.value, vecs.value>(u, queries, stride, s + u * kUnit); });
      }
    });
  }

  // values [rows][stride] = values * fade [rows] + weights [rows][kTile] * V for the rows [first, last) of the group:
  // together as far as they see the same whole blocks, then those of each position alone.
  void add_values(const Group& group, int first, int last, const bf16* weights, const float* fade, float* values,
                  int64_t stride) {
    const int* high = group.high;
    const Output to{weights, values, stride};
    if (high[last - 1] == high[first]) return add_range(to, first, last, group.low, high[first], fade);
    constexpr int kPositions = 2 * kPairs;
    const int shared = high[first] / kPositions * kPositions;
    const bool together = shared > group.low;
    if (together) add_range(to, first, last, group.low, shared, fade);
    float ones[kMostGroupRows];
    std::fill_n(ones, kMostGroupRows, 1.0f);
    for (int r = first, end; r < last; r = end) {
      for (end = r + 1; end < last && high[end] == high[r];) ++end;
      const int low = together ? shared : group.low;
      if (low < high[r]) add_range(to, r, end, low, high[r], together ? ones : fade);
    }
  }

 private:
  static constexpr int kUnitPairs = kUnit / 2;
  struct Output {
    const bf16* weights;
    float* values;
    int64_t stride;
  };

  template <int kRows, int kVecs>
  void score_block(int unit, const bf16* queries, int64_t stride, float* s) const {
    const bf16 *const *keys = keys_ + unit, *const *next = next_keys_ + unit;
    BlockSums<kRows, kVecs> sums;
    unrolled<kRows>([&](auto r) { unrolled<kVecs>([&](auto v) { sums.at[r][v] = vzero(); }); });
    for (int64_t begin = 0; begin < d_ / 2; begin += kPairs) {
      sums.add(begin, std::min(begin + kPairs, d_ / 2), queries, stride, [&](int64_t i, auto v) {
        __builtin_prefetch(next[v] + i * 2 * kUnit, 0, 2);
        return pload(keys[v] + i * 2 * kUnit);
      });
    }
    unrolled<kRows>([&](auto r) {
      unrolled<kVecs>([&](auto v) { vstore(s + r * kTile + v * kUnit, vmul(sums.at[r][v], vset(scale_))); });
    });
  }

  // The rows [first, last) of the group and the positions [low, high) of the tile.
  void add_range(const Output& to, int first, int last, int low, int high, const float* fade) {
    const int begin = low / 2, end = (high + 1) / 2;
    const bf16 *first_pair = pairs_[begin], *last_pair = pairs_[end - 1];
    if (low % 2 != 0) pairs_[begin] = half_of(pairs_[begin], 0xffff0000u, edges_);
    if (high % 2 != 0) pairs_[end - 1] = half_of(pairs_[end - 1], 0x0000ffffu, edges_ + d_);
    const int vecs = static_cast<int>(d_ / kLanes);
    with_count<kMostRows>(last - first, [&](auto rows) {
      constexpr int kMost = rows == 1 ? 8 : rows == 2 ? 4 : 2;
      for (int v = 0; v < vecs; v += kMost) {
        with_count<kMost>(std::min(kMost, vecs - v), [&](auto count) {
          value_block<rows.value, count.value>(to, first, begin, end, v * kLanes, fade + first);
        });
      }
    });
    pairs_[end - 1] = last_pair;
    pairs_[begin] = first_pair;
  }

  // The pairs [begin, end) of positions, block by block.
  template <int kRows, int kVecs>
  void value_block(const Output& to, int row, int64_t begin, int64_t end, int64_t column, const float* fade) const {
    float* values = to.values + row * to.stride + column;
    BlockSums<kRows, kVecs> sums;
    unrolled<kRows>([&](auto r) {
      unrolled<kVecs>([&](auto v) { sums.at[r][v] = vmul(vload(values + r * to.stride + v * kLanes), vset(fade[r])); });
    });
    while (begin < end) {
      const int64_t after = std::min((begin / kPairs + 1) * kPairs, end);
      sums.add(begin, after, to.weights + row * kTile, kTile, [&](int64_t i, auto v) {
        __builtin_prefetch(next_pairs_[i] + 2 * (column + v * kLanes), 0, 2);
        return pload(pairs_[i] + 2 * (column + v * kLanes));
      });
      begin = after;
    }
    unrolled<kRows>(
        [&](auto r) { unrolled<kVecs>([&](auto v) { vstore(values + r * to.stride + v * kLanes, sums.at[r][v]); }); });
  }

  // A copy of a pair of value rows with one of the two zeroed.
  const bf16* half_of(const bf16* pair, uint32_t mask, uint32_t* to) const {
    for (int64_t i = 0; i < d_; ++i) {
      uint32_t both;
      std::memcpy(&both, pair + 2 * i, 4);
      to[i] = both & mask;
    }
    return reinterpret_cast<const bf16*>(to);
  }

  const int64_t d_;
  const float scale_;
  uint32_t* edges_;
  bool prefetches_ = false;
  const bf16* keys_[kTileUnits] = {};
  const bf16* pairs_[kTile / 2] = {};  // values of two positions each
  // The same of the next tile, which is fetched while this one is used.
  const bf16* next_keys_[kTileUnits] = {};
  const bf16* next_pairs_[kTile / 2] = {};
};

}  // namespace quire

#endif
