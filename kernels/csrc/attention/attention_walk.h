// One online softmax per row over the tiles of a sequence, and the joining of its segments.
//
// Promises: what is computed for a row, and in which order, depends on its position alone, and on the length of its
// sequence where rows see what is behind them: not on the task it is part of, nor on which worker takes which segment.
// Must not know: how keys and values are stored, who computes what.
#pragma once

#include <cmath>
#include <limits>

#include "attention/attention_tile.h"
#include "runtime/context.h"

namespace quire {

// Consecutive query rows of one sequence under one kv head: num_rows = queries * heads per kv head.
struct Task {
  int64_t sequence;
  int64_t first_row;       // of the call
  int64_t first_position;  // of the sequence
  int64_t queries;
  int64_t end;  // of the positions that its last row sees
  int64_t segments() const { return (end + kSegment - 1) / kSegment; }
};

// Consecutive kv heads that a worker takes together. Rows are counted head by head.
struct Heads {
  int64_t first, count;
};

// The state of a row's softmax, in floats: [0] the peak, [16, 32) sums by lane, [32, 32 + d) weighted values.
constexpr int64_t kTotals = kLanes, kValues = 2 * kLanes;
inline int64_t state_stride(int64_t d) { return kValues + d; }

// The positions [first_visible, end_visible) that a row at `position` of a sequence of `length` positions sees.
inline int64_t first_visible(int64_t position, int64_t window) {
  return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
}
inline int64_t end_visible(int64_t position, const AttentionShape& shape, int64_t length) {
  if (!shape.bidirectional) return position + 1;
  return shape.window > 0 ? std::min(position + shape.window, length) : length;
}

// Those of them that the tile at `start` holds, relative to `start`. Empty: both 0.
struct Range {
  int low, high;
  bool empty() const { return low == high; }
};
inline Range visible(int64_t position, const AttentionShape& shape, int64_t length, int64_t start) {
  const int64_t low = std::max(first_visible(position, shape.window) - start, int64_t{0});
  const int64_t high = std::min(end_visible(position, shape, length) - start, int64_t{kTile});
  return low < high ? Range{static_cast<int>(low), static_cast<int>(high)} : Range{0, 0};
}

// Scores are kept in powers of two, so that a weight costs a subtraction and an exponential.
constexpr float kLog2E = 1.44269504088896341f;

template <typename Kv>
class Walk {
 public:
  static constexpr int kGroupRows = Kv::kGroupRows;

  static int64_t scratch_bytes(int64_t rows, int64_t d) {
    return kGroupRows * kTile * 4 + aligned(rows * static_cast<int64_t>(sizeof(Range))) + Kv::scratch_bytes(rows, d);
  }

  Walk(char* scratch, int64_t rows, const AttentionShape& shape, const KvPool& pool, const AttentionStep& step,
       int64_t layer, Fetch fetch)
      : shape_(shape),
        pool_(pool),
        step_(step),
        layer_(layer),
        group_heads_(shape.num_heads / shape.num_kv_heads),
        head_bytes_(pool.units * unit_bytes(pool.kind, pool.head_dim)),
        scores_(reinterpret_cast<float*>(scratch)),
        ranges_(reinterpret_cast<Range*>(scores_ + kGroupRows * kTile)),
        kv_(reinterpret_cast<char*>(ranges_) + aligned(rows * static_cast<int64_t>(sizeof(Range))), rows,
            shape.head_dim, shape.scale * kLog2E, fetch) {}

  void set_queries(const Task& task, const Heads& heads, const bf16* q) {
    int64_t row = 0;
    for (int64_t head = heads.first; head < heads.first + heads.count; ++head) {
      for (int64_t i = 0; i < task.queries; ++i) {
        const bf16* from = q + ((task.first_row + i) * shape_.num_heads + head * group_heads_) * shape_.head_dim;
        for (int64_t g = 0; g < group_heads_; ++g) kv_.set_query(row++, from + g * shape_.head_dim);
      }
    }
  }

  // The first tile that `segment` will read: no units where there is none.
  Tile first_tile(const Task& task, int64_t head, int64_t index) const {
    Tile tile{};
    const Span span = span_of(task, index);
    if (span.begin >= span.end || !find(task, head, span.begin, span, &tile)) return {};
    return tile;
  }

  // The softmax of the task's rows over one segment alone; `after` is the tile that the worker reads then. False if a
  // block does not exist.
  bool segment(const Task& task, const Heads& heads, int64_t index, const Tile& after, float* state) {
    const int64_t stride = state_stride(shape_.head_dim), rows = task.queries * group_heads_;
    for (int64_t r = 0; r < rows * heads.count; ++r) {
      state[r * stride] = -std::numeric_limits<float>::infinity();
      std::fill_n(state + r * stride + kTotals, stride - kTotals, 0.0f);
    }
    const Span span = span_of(task, index);
    Tile tile{}, next{};
    if (span.begin < span.end && !find(task, heads.first, span.begin, span, &next)) return false;
    for (int64_t start = span.begin; start < span.end; start += kTile) {
      tile = next;
      next = after;
      if (start + kTile < span.end && !find(task, heads.first, start + kTile, span, &next)) return false;
      set_ranges(task, start);
      if constexpr (Kv::kKnowsBounds) {
        kv_.bound(static_cast<int>(std::max(span.oldest, start) - start),
                  static_cast<int>(std::min(span.end - start, int64_t{kTile})));
      }
      for (int64_t h = 0; h < heads.count; ++h) {
        const Tile of_head = tile.moved(h * head_bytes_);
        kv_.open(of_head, h + 1 < heads.count ? of_head.moved(head_bytes_) : next);
        rows_of_tile(of_head, h * rows, rows, state);
      }
    }
    return true;
  }

  // Joins segment `index` of the task's rows to the segments before it.
  void join(const Task& task, const Heads& heads, int64_t index, const float* part, float* total) const {
    const int64_t stride = state_stride(shape_.head_dim), rows = task.queries * group_heads_;
    for (int64_t i = 0; i < rows * heads.count; ++i) {
      const int64_t position = task.first_position + i % rows / group_heads_;
      const int64_t first = first_visible(position, shape_.window) / kSegment;
      if (index < first || index * kSegment >= end_visible(position, shape_, length_of(task))) continue;
      if (index == first) {
        std::copy_n(part + i * stride, stride, total + i * stride);
      } else {
        join_row(part + i * stride, total + i * stride, stride);
      }
    }
  }

  // The rows' results: once for each row, so that a sink counts once, whatever segments there are.
  void write(const Task& task, const Heads& heads, const float* total, bf16* out) const {
    const int64_t d = shape_.head_dim, stride = state_stride(d);
    const float* row = total;
    for (int64_t head = heads.first; head < heads.first + heads.count; ++head) {
      for (int64_t i = 0; i < task.queries; ++i) {
        bf16* to = out + ((task.first_row + i) * shape_.num_heads + head * group_heads_) * d;
        for (int64_t g = 0; g < group_heads_; ++g, row += stride, to += d) {
          const Vec inverse = vset(share(row[0], lane_sum(vload(row + kTotals)), head * group_heads_ + g));
          for (int64_t c = 0; c < d; c += kLanes) {
            const Vec value = vmul(vload(row + kValues + c), inverse);
            vstore_bf16(to + c, Kv::kSignedZeros ? value : vadd(value, vzero()));
          }
        }
      }
    }
  }

 private:
  static constexpr int kFactors = (kGroupRows + kLanes - 1) / kLanes * kLanes;  // of a group, in whole vectors

  // The positions that a segment of a task sees: [oldest, end), in tiles from `begin` on.
  struct Span {
    int64_t begin, oldest, end;
  };
  Span span_of(const Task& task, int64_t index) const {
    const int64_t oldest = first_visible(task.first_position, shape_.window);
    return {std::max(index * kSegment, oldest / kTile * kTile), oldest, std::min((index + 1) * kSegment, task.end)};
  }

  int64_t length_of(const Task& task) const { return step_.context_lens[task.sequence]; }

  // The units of the tile at `start` that hold positions of the span. False if one does not exist.
  bool find(const Task& task, int64_t head, int64_t start, const Span& span, Tile* tile) const {
    const int32_t* table = step_.block_tables + task.sequence * step_.table_width;
    const int64_t low = std::max(span.oldest, start) - start, high = std::min(span.end - start, int64_t{kTile});
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

  // What a row's weighted values are multiplied by in the end.
  float share(float peak, float total, int64_t query_head) const {
    if (shape_.sinks == nullptr) return 1.0f / total;
    const float sink = shape_.sinks[query_head] * kLog2E, most = std::max(peak, sink);
    const float fade = lane_max(vexp2(vset(peak - most)));
    return fade / (total * fade + lane_max(vexp2(vset(sink - most))));
  }

  // The scores of whole units, in powers of two, under the layer's cap: tanh x = 1 - 2 / (1 + e^2x), to 1e-6 of it.
  template <int kUnits>
  void cap_scores(float* s) const {
    const Vec cap = vset(shape_.softcap * kLog2E), double_inverse = vset(2.0f / shape_.softcap);
    for (int u = 0; u < kUnits; ++u) {
      const Vec power = vexp2(vmul(vload(s + u * kUnit), double_inverse));
      const Vec rest = vdiv(vset(2.0f), vadd(vset(1.0f), power));
      vstore(s + u * kUnit, vmul(cap, vsub(vset(1.0f), rest)));
    }
  }

  // What each row of a head sees of the tile.
  void set_ranges(const Task& task, int64_t start) {
    for (int64_t i = 0; i < task.queries; ++i) {
      const Range seen = visible(task.first_position + i, shape_, length_of(task), start);
      std::fill_n(ranges_ + i * group_heads_, group_heads_, seen);
    }
  }

  // The `rows` rows of one head, counted from `first` on, against a tile that was opened for them.
  void rows_of_tile(const Tile& tile, int64_t first, int64_t rows, float* state) {
    for (int64_t row = 0, end; row < rows; row = end) {
      const Range range = ranges_[row];
      for (end = row + 1; end < rows; ++end) {
        if (ranges_[end].low != range.low || ranges_[end].empty() != range.empty()) break;
      }
      if (range.empty()) continue;
      const int64_t count = end - row, blocks = (count + kGroupRows - 1) / kGroupRows;
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t from = row + count * b / blocks, to = row + count * (b + 1) / blocks;
        Group group{first + from, static_cast<int>(to - from), range.low, {}};
        for (int r = 0; r < group.rows; ++r) group.high[r] = ranges_[from + r].high;
        block_of_rows(group, state);
        if (from == 0 && to < rows) kv_.open(tile, tile);  // the next one is on its way
      }
    }
  }

  void block_of_rows(const Group& group, float* state) {
    const int64_t stride = state_stride(shape_.head_dim);
    float* rows = state + group.first_row * stride;
    float fade[kFactors];
    kv_.score(group, scores_);
    with_count<kTileUnits>(group.last_unit() - group.first_unit(),
                           [&](auto units) { weigh<units.value>(group, rows, stride, fade); });
    kv_.add_values(group, fade, rows + kValues, stride);
  }

  // Turns the block's scores into weights; peaks and sums move on. `fade`: the factors for what is behind.
  template <int kUnits>
  void weigh(const Group& group, float* rows, int64_t stride, float* fade) {
    const float lowest = -std::numeric_limits<float>::infinity();
    const int first = group.first_unit();
    float before[kFactors] = {}, peaks[kFactors] = {};
    for (int r = 0; r < group.rows; ++r) {
      float* s = scores_ + r * kTile;
      if (shape_.softcap > 0) cap_scores<kUnits>(s + first * kUnit);
      for (int i = first * kUnit; i < group.low; ++i) s[i] = lowest;
      for (int i = group.high[r]; i < (first + kUnits) * kUnit; ++i) s[i] = lowest;
      Vec best = vload(s + first * kUnit);
      for (int u = 1; u < kUnits; ++u) best = vmax(best, vload(s + (first + u) * kUnit));
      before[r] = rows[r * stride];
      peaks[r] = std::max(before[r], lane_max(best));
    }
    vstore(fade, vexp2(vsub(vload(before), vload(peaks))));
    for (int r = kLanes; r < kFactors; r += kLanes) {
      vstore(fade + r, vexp2(vsub(vload(before + r), vload(peaks + r))));
    }
    for (int r = 0; r < group.rows; ++r) {
      float* row = rows + r * stride;
      Vec sum = vmul(vload(row + kTotals), vset(fade[r]));
      for (int i = 0; i < kUnits; ++i) {
        const int u = first + i;
        const Vec weights = vexp2(vsub(vload(scores_ + r * kTile + u * kUnit), vset(peaks[r])));
        sum = vadd(sum, kv_.set_weights(r, u, weights, group.low - u * kUnit, group.high[r] - u * kUnit));
      }
      kv_.finish_weights(r, first, first + kUnits);
      row[0] = peaks[r];
      vstore(row + kTotals, sum);
    }
  }

  static void join_row(const float* from, float* to, int64_t stride) {
    const float peak = std::max(to[0], from[0]);
    const Vec old_fade = vexp2(vset(to[0] - peak)), new_fade = vexp2(vset(from[0] - peak));
    to[0] = peak;
    for (int64_t c = kTotals; c < stride; c += kLanes) {
      vstore(to + c, vfma(vload(from + c), new_fade, vmul(vload(to + c), old_fade)));
    }
  }

  const AttentionShape& shape_;
  const KvPool& pool_;
  const AttentionStep& step_;
  const int64_t layer_, group_heads_, head_bytes_;
  float* scores_;  // [kGroupRows][kTile]
  Range* ranges_;  // [rows of a head], of the tile
  Kv kv_;
};

}  // namespace quire
