// One online softmax per row over the tiles of a sequence, and the joining of its segments.
//
// Promises: what is computed for a row, and in which order, depends on its position alone: not on the task it is part
// of, nor on which worker takes which segment. Must not know: how keys and values are stored, who computes what.
#pragma once

#include <cmath>
#include <limits>

#include "attention_tile.h"

namespace quire {

// Consecutive query rows of one sequence under one kv head: num_rows = queries * heads per kv head.
struct Task {
  int64_t sequence;
  int64_t first_row;       // of the call
  int64_t first_position;  // of the sequence
  int64_t queries;
  int64_t last_position() const { return first_position + queries - 1; }
  int64_t segments() const { return last_position() / kSegment + 1; }
};

// The state of a row's softmax, in floats: [0] the peak, [16, 32) sums by lane, [32, 32 + d) weighted values.
constexpr int64_t kTotals = kLanes, kValues = 2 * kLanes;
inline int64_t state_stride(int64_t d) { return kValues + d; }

// The positions of the tile at `start` that a row at `position` sees, relative to `start`. Empty: both 0.
struct Range {
  int low, high;
  bool operator==(const Range& other) const { return low == other.low && high == other.high; }
};
inline Range visible(int64_t position, int64_t window, int64_t start) {
  const int64_t oldest = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
  const int64_t low = std::max(oldest - start, int64_t{0});
  const int64_t high = std::min(position + 1 - start, int64_t{kTile});
  return low < high ? Range{static_cast<int>(low), static_cast<int>(high)} : Range{0, 0};
}
inline int64_t first_visible(int64_t position, int64_t window) {
  return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
}

// e^x of one number, computed as for the others.
inline float exp_of(float x) {
  float lanes[kLanes];
  vstore(lanes, vexp(vset(x)));
  return lanes[0];
}

template <typename Kv>
class Walk {
 public:
  static int64_t scratch_bytes(int64_t rows, int64_t d) {
    return kBlockRows * kTile * 4 + Kv::scratch_bytes(rows, d);
  }

  Walk(char* scratch, int64_t rows, const AttentionShape& shape, const KvPool& pool, const AttentionStep& step,
       int64_t layer)
      : shape_(shape),
        pool_(pool),
        step_(step),
        layer_(layer),
        group_heads_(shape.num_heads / shape.num_kv_heads),
        scores_(reinterpret_cast<float*>(scratch)),
        kv_(scratch + kBlockRows * kTile * 4, rows, shape.head_dim, shape.scale) {}

  void set_queries(const Task& task, int64_t head, const bf16* q) {
    for (int64_t i = 0; i < task.queries; ++i) {
      const bf16* row = q + ((task.first_row + i) * shape_.num_heads + head * group_heads_) * shape_.head_dim;
      for (int64_t g = 0; g < group_heads_; ++g) kv_.set_query(i * group_heads_ + g, row + g * shape_.head_dim);
    }
  }

  // The softmax of the task's rows over one segment alone. False if a block does not exist.
  bool segment(const Task& task, int64_t head, int64_t index, float* state) {
    const int64_t stride = state_stride(shape_.head_dim);
    for (int64_t r = 0; r < task.queries * group_heads_; ++r) {
      state[r * stride] = -std::numeric_limits<float>::infinity();
      std::fill_n(state + r * stride + kTotals, stride - kTotals, 0.0f);
    }
    const int64_t oldest = first_visible(task.first_position, shape_.window);
    const int64_t begin = std::max(index * kSegment, oldest / kTile * kTile);
    const int64_t end = std::min((index + 1) * kSegment, task.last_position() + 1);
    Tile tile{}, next{};
    if (begin < end && !find(task, head, begin, oldest, end, &next)) return false;
    for (int64_t start = begin; start < end; start += kTile) {
      tile = next;
      next = {};
      if (start + kTile < end && !find(task, head, start + kTile, oldest, end, &next)) return false;
      kv_.open(tile, next);
      rows_of_tile(task, start, state);
    }
    return true;
  }

  // Joins segment `index` of the task's rows to the segments before it.
  void join(const Task& task, int64_t index, const float* part, float* total) const {
    const int64_t stride = state_stride(shape_.head_dim);
    for (int64_t i = 0; i < task.queries; ++i) {
      const int64_t position = task.first_position + i;
      const int64_t first = first_visible(position, shape_.window) / kSegment;
      if (index < first || index > position / kSegment) continue;
      for (int64_t r = i * group_heads_; r < (i + 1) * group_heads_; ++r) {
        const float* from = part + r * stride;
        float* to = total + r * stride;
        if (index == first) {
          std::copy_n(from, stride, to);
        } else {
          join_row(from, to, stride);
        }
      }
    }
  }

  void write(const Task& task, int64_t head, const float* total, bf16* out) const {
    const int64_t d = shape_.head_dim, stride = state_stride(d);
    for (int64_t i = 0; i < task.queries; ++i) {
      for (int64_t g = 0; g < group_heads_; ++g) {
        const float* row = total + (i * group_heads_ + g) * stride;
        bf16* to = out + ((task.first_row + i) * shape_.num_heads + head * group_heads_ + g) * d;
        const Vec inverse = vset(1.0f / lane_sum(vload(row + kTotals)));
        for (int64_t c = 0; c < d; c += kLanes) vstore_bf16(to + c, vmul(vload(row + kValues + c), inverse));
      }
    }
  }

 private:
  // The units of the tile at `start` that hold positions [oldest, end). False if one does not exist.
  bool find(const Task& task, int64_t head, int64_t start, int64_t oldest, int64_t end, Tile* tile) const {
    const int32_t* table = step_.block_tables + task.sequence * step_.table_width;
    const int64_t low = std::max(oldest, start) - start, high = std::min(end - start, int64_t{kTile});
    tile->first_unit = static_cast<int>(low / kUnit);
    tile->last_unit = static_cast<int>((high + kUnit - 1) / kUnit);
    for (int u = tile->first_unit; u < tile->last_unit; ++u) {
      const int64_t unit = start / kUnit + u;
      const int64_t entry = unit / pool_.units;
      if (entry >= step_.table_width) return false;
      const int64_t block = table[entry];
      if (block < 0 || block >= pool_.num_blocks) return false;
      tile->units[u] = unit_address(pool_, block, layer_, head, unit % pool_.units);
    }
    return true;
  }

  void rows_of_tile(const Task& task, int64_t start, float* state) {
    const int64_t num_rows = task.queries * group_heads_;
    int64_t row = 0;
    while (row < num_rows) {
      const Range range = range_of(task, row, start);
      int64_t end = row + 1;
      while (end < num_rows && range_of(task, end, start) == range) ++end;
      if (range.low < range.high) {
        const int64_t count = end - row, blocks = (count + kBlockRows - 1) / kBlockRows;
        for (int64_t b = 0; b < blocks; ++b) {
          const int64_t from = row + count * b / blocks, to = row + count * (b + 1) / blocks;
          block_of_rows({from, static_cast<int>(to - from), range.low, range.high}, state);
        }
      }
      row = end;
    }
  }

  Range range_of(const Task& task, int64_t row, int64_t start) const {
    return visible(task.first_position + row / group_heads_, shape_.window, start);
  }

  void block_of_rows(const Group& group, float* state) {
    const int64_t stride = state_stride(shape_.head_dim);
    float* rows = state + group.first_row * stride;
    float fade[kBlockRows];
    kv_.score(group, scores_);
    for (int r = 0; r < group.rows; ++r) fade[r] = weigh(group, r, scores_ + r * kTile, rows + r * stride);
    kv_.add_values(group, fade, rows + kValues, stride);
  }

  // Turns a row's scores into weights; its peak and sums move on. Returns the factor for what is behind.
  float weigh(const Group& group, int r, float* s, float* row) {
    const float lowest = -std::numeric_limits<float>::infinity();
    const int first = group.first_unit(), last = group.last_unit();
    std::fill(s + first * kUnit, s + group.low, lowest);
    std::fill(s + group.high, s + last * kUnit, lowest);
    Vec best = vload(s + first * kUnit);
    for (int u = first + 1; u < last; ++u) best = vmax(best, vload(s + u * kUnit));
    const float before = row[0];
    const float peak = std::max(before, lane_max(best));
    float fade = 1.0f;
    if (peak > before) fade = before == lowest ? 0.0f : exp_of(before - peak);
    Vec sum = vmul(vload(row + kTotals), vset(fade));
    for (int u = first; u < last; ++u) {
      const Vec weights = vexp(vsub(vload(s + u * kUnit), vset(peak)));
      sum = vadd(sum, kv_.set_weights(r, u, weights, group.low - u * kUnit, group.high - u * kUnit));
    }
    kv_.finish_weights(r, first, last);
    row[0] = peak;
    vstore(row + kTotals, sum);
    return fade;
  }

  static void join_row(const float* from, float* to, int64_t stride) {
    const float peak = std::max(to[0], from[0]);
    const Vec old_fade = vset(exp_of(to[0] - peak)), new_fade = vset(exp_of(from[0] - peak));
    to[0] = peak;
    for (int64_t c = kTotals; c < stride; c += kLanes) {
      vstore(to + c, vfma(vload(from + c), new_fade, vmul(vload(to + c), old_fade)));
    }
  }

  const AttentionShape& shape_;
  const KvPool& pool_;
  const AttentionStep& step_;
  const int64_t layer_, group_heads_;
  float* scores_;  // [kBlockRows][kTile]
  Kv kv_;
};

}  // namespace quire
