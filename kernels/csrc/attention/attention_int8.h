// The arithmetic of attention on int8 keys and values: exact integer products, one scale per position and head.
//
// Promises: queries and weights enter as 16 bits in two bytes, far finer than what they meet, and integer sums have no
// order; so a row's result does not depend on the number of rows in the block. Masked positions have weight 0 exactly.
// Must not know: sequences, tables, the order of work.
#pragma once

#include <cstring>

#include "attention/attention_quantize.h"
#include "attention/attention_tile.h"
#include "simd/prefetch.h"

namespace quire {

class Int8Kv {
 public:
  static constexpr int kGroupRows = kBlockRows;
  static constexpr bool kKnowsBounds = false, kSignedZeros = true;
  struct Mode {};

  static int64_t scratch_bytes(int64_t rows, int64_t d) {
    return kMostGroupRows * kTile * 6 + rows * (2 * d + kHeader * 4);
  }

  Int8Kv(char* scratch, int64_t rows, int64_t d, float scale, Fetch fetch)
      : d_(d),
        scale_(scale),
        fetch_(fetch),
        scaled_(reinterpret_cast<float*>(scratch)),
        headers_(scaled_ + kMostGroupRows * kTile),
        weights_(reinterpret_cast<uint8_t*>(headers_ + rows * kHeader)),
        queries_(reinterpret_cast<int8_t*>(weights_ + kMostGroupRows * kTile * 2)) {}

  // q = (256 * high + low) * step, with high and low signed bytes.
  void set_query(int64_t row, const bf16* query) {
    int8_t* high = queries_ + row * 2 * d_;
    int8_t* low = high + d_;
    const Largest largest = largest_of(query, d_, [](const bf16* p) { return vload_bf16(p); });
    const Vec per_step = vset(largest.value > kNothing ? kQuerySteps / largest.value : 0.0f);
    Ints sum_high = izero(), sum_low = izero();
    for (int64_t i = 0; i < d_; i += kLanes) {
      const Vec value = vround(bounded(vmul(vload_bf16(query + i), per_step), kQuerySteps));
      // The fraction is a multiple of 1/256: the subtrahend makes the low byte -128..127.
      const Vec upper = vround(vsub(vmul(value, vset(1.0f / 256)), vset(-1.0f / 512)));
      const Ints upper_int = to_ints(upper), lower_int = to_ints(vsub(value, vmul(upper, vset(256.0f))));
      store_bytes(high + i, upper_int);
      store_bytes(low + i, lower_int);
      sum_high = iadd(sum_high, upper_int);
      sum_low = iadd(sum_low, lower_int);
    }
    float* header = headers_ + row * kHeader;
    header[0] = largest.value / kQuerySteps * scale_ + largest.nan;
    const int32_t offsets[2] = {-128 * lane_sum(sum_high), -128 * lane_sum(sum_low)};  // of the keys
    std::memcpy(header + 1, offsets, sizeof(offsets));
  }

  // The tile of the calls that follow, and the one after it, which they bring closer.
  void open(const Tile& tile, const Tile& next) {
    for (int u = tile.first_unit; u < tile.last_unit; ++u) {
      units_[u] = tile.units[u];
      next_[u] = next.has(u) ? next.units[u] : tile.units[u];
      for (int i = 0; i < kUnitQuads; ++i) {
        const int64_t at = (kUnit + 4 * i) * d_;
        quads_[u * kUnitQuads + i] = units_[u] + at;
        next_quads_[u * kUnitQuads + i] = next_[u] + at;
      }
    }
  }

  void score(const Group& group, float* s) const {
    for (int u = group.first_unit(); u < group.last_unit(); u += kVecs) {
      with_count<kVecs>(std::min(kVecs, group.last_unit() - u), [&](auto vecs) {
        for (int r = 0; r < group.rows; r += kRows) {
          with_count<kRows>(std::min(kRows, group.rows - r), [&](auto rows) {
            with_fetch(fetch_, [&](auto second) {
              score_block<rows.value, vecs.value, second>(u, group.first_row + r, s + r * kTile + u * kUnit);
            });
          });
        }
      });
    }
  }

  // Keeps the unit's weights times the values' scales for `finish_weights`; the weights themselves are summed.
  Vec set_weights(int row, int unit, Vec weights, int low, int high) {
    Vec scaled = vmul(weights, vload(scales_of(units_[unit]) + kUnit));
    if (low > 0 || high < kUnit) {  // a masked position's scale may be anything
      weights = keep(weights, low, high, 0.0f);
      scaled = keep(scaled, low, high, 0.0f);
    }
    vstore(scaled_ + row * kTile + unit * kUnit, scaled);
    return weights;
  }

  // weight * scale = (256 * high + low) * step, with high and low unsigned bytes.
  void finish_weights(int row, int first, int last) {
    const float* scaled = scaled_ + row * kTile;
    Vec best = vload(scaled + first * kUnit);
    for (int u = first + 1; u < last; ++u) best = vmax(best, vload(scaled + u * kUnit));
    const float most = lane_max(best);
    steps_[row] = most / kWeightSteps;
    const Vec per_step = vset(most > kNothing ? kWeightSteps / most : 0.0f);
    uint8_t* high = weights_ + row * 2 * kTile;
    for (int u = first; u < last; ++u) {
      const Vec value = vround(vmin(vmul(vload(scaled + u * kUnit), per_step), vset(kWeightSteps)));
      // Rounding down: the subtrahend is just below a half, and the fraction a multiple of 1/256.
      const Vec upper = vround(vsub(vmul(value, vset(1.0f / 256)), vset(255.0f / 512)));
      store_bytes(high + u * kUnit, to_ints(upper));
      store_bytes(high + kTile + u * kUnit, to_ints(vsub(value, vmul(upper, vset(256.0f)))));
    }
  }

  void add_values(const Group& group, const float* fade, float* values, int64_t stride) const {
    // Whole quads: what is masked inside them has weight 0, and the units' other quads were given 0 too.
    const int begin = group.low / 4, end = (group.high[group.rows - 1] + 3) / 4;
    const int vecs = static_cast<int>(d_ / kLanes);
    for (int v = 0; v < vecs; v += kVecs) {
      with_count<kVecs>(std::min(kVecs, vecs - v), [&](auto count) {
        for (int r = 0; r < group.rows; r += kRows) {
          with_count<kRows>(std::min(kRows, group.rows - r), [&](auto rows) {
            with_fetch(fetch_, [&](auto second) {
              value_block<rows.value, count.value, second>(begin, end, r, v * kLanes, fade, values + r * stride,
                                                           stride);
            });
          });
        }
      });
    }
  }

 protected:
  // Two sums for each output.
  static constexpr int kRows = kBlockRows > 2 ? kBlockRows / 2 : 1, kVecs = kBlockVecs;
  static constexpr int kUnitQuads = kUnit / 4;
  static constexpr int64_t kHeader = 4;  // of a query: step, then two offsets as integers
  static constexpr float kQuerySteps = 127 * 256 + 127, kWeightSteps = 65535;

  // A unit's 16 key scales; its value scales follow.
  const float* scales_of(const char* unit) const { return reinterpret_cast<const float*>(unit + 2 * kUnit * d_); }

  static Ints quad(const void* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return iset(bytes);
  }

  // 256 * high + low; both sums are below 2^23, in heads of up to 512.
  static Vec joined(Ints high, Ints low) { return vfma(to_vec(high), vset(256.0f), to_vec(low)); }

  template <int kRowCount, int kVecCount, bool kToSecond>
  void score_block(int unit, int64_t first_row, float* s) const {
    const char *const *units = units_ + unit, *const *next = next_ + unit;
    Ints high[kRowCount][kVecCount], low[kRowCount][kVecCount];
    for (int r = 0; r < kRowCount; ++r) {
      int32_t offsets[2];
      std::memcpy(offsets, headers_ + (first_row + r) * kHeader + 1, sizeof(offsets));
      for (int v = 0; v < kVecCount; ++v) {
        high[r][v] = iset(offsets[0]);
        low[r][v] = iset(offsets[1]);
      }
    }
    for (int64_t i = 0; i < d_; i += 4) {
      Ints k[kVecCount];
      for (int v = 0; v < kVecCount; ++v) {
        k[v] = iload(units[v] + i * kUnit);
        prefetch_line<kToSecond>(next[v] + i * kUnit);
      }
      for (int r = 0; r < kRowCount; ++r) {
        const int8_t* query = queries_ + (first_row + r) * 2 * d_ + i;
        const Ints upper = quad(query), lower = quad(query + d_);
        for (int v = 0; v < kVecCount; ++v) {
          high[r][v] = dot4(high[r][v], k[v], upper);
          low[r][v] = dot4(low[r][v], k[v], lower);
        }
      }
    }
    for (int r = 0; r < kRowCount; ++r) {
      const Vec step = vset(headers_[(first_row + r) * kHeader]);
      for (int v = 0; v < kVecCount; ++v) {
        const Vec scales = vmul(vload(scales_of(units[v])), step);
        vstore(s + r * kTile + v * kUnit, vmul(joined(high[r][v], low[r][v]), scales));
      }
    }
  }

  template <int kRowCount, int kVecCount, bool kToSecond>
  void value_block(int begin, int end, int row, int64_t column, const float* fade, float* values,
                   int64_t stride) const {
    Ints high[kRowCount][kVecCount], low[kRowCount][kVecCount];
    for (int r = 0; r < kRowCount; ++r) {
      for (int v = 0; v < kVecCount; ++v) high[r][v] = low[r][v] = izero();
    }
    for (int i = begin; i < end; ++i) {
      const char *at = quads_[i] + 4 * column, *next = next_quads_[i] + 4 * column;
      Ints x[kVecCount];
      for (int v = 0; v < kVecCount; ++v) {
        x[v] = iload(at + v * 4 * kLanes);
        prefetch_line<kToSecond>(next + v * 4 * kLanes);
      }
      for (int r = 0; r < kRowCount; ++r) {
        const uint8_t* weights = weights_ + (row + r) * 2 * kTile + 4 * i;
        const Ints upper = quad(weights), lower = quad(weights + kTile);
        for (int v = 0; v < kVecCount; ++v) {
          high[r][v] = dot4(high[r][v], upper, x[v]);
          low[r][v] = dot4(low[r][v], lower, x[v]);
        }
      }
    }
    for (int r = 0; r < kRowCount; ++r) {
      const Vec step = vset(steps_[row + r]), kept = vset(fade[row + r]);
      for (int v = 0; v < kVecCount; ++v) {
        float* to = values + r * stride + column + v * kLanes;
        vstore(to, vfma(joined(high[r][v], low[r][v]), step, vmul(vload(to), kept)));
      }
    }
  }

  const int64_t d_;
  const float scale_;
  const Fetch fetch_;  // of the tile that follows
  float* scaled_;      // [kMostGroupRows][kTile]
  float* headers_;     // [rows][kHeader]
  uint8_t* weights_;   // [kMostGroupRows][2][kTile], high bytes then low ones
  int8_t* queries_;    // [rows][2][d]
  float steps_[kMostGroupRows] = {};
  const char* units_[kTileUnits] = {};
  const char* quads_[kTile / 4] = {};  // values of four positions each
  // The same of the next tile, which is fetched while this one is used.
  const char* next_[kTileUnits] = {};
  const char* next_quads_[kTile / 4] = {};
};

}  // namespace quire
