// How the panels of a matrix are divided among ranks, and the columns of a result put together.
//
// Promises: a panel is multiplied whole, by one rank, into the place that it has in the whole result. Must not know:
// kinds of weights, how columns travel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/ranks.h"
#include "weights/linear.h"

namespace quire {

struct Panels {
  int64_t first, end;
  int64_t count() const { return end - first; }
};

// Panels [first, end) each, rising, none in two of them.
struct PanelRanges {
  static constexpr int kMost = 3;
  Panels at[kMost];
  int count;

  int64_t total() const {
    int64_t sum = 0;
    for (int i = 0; i < count; ++i) sum += at[i].count();
    return sum;
  }

  // Those of outputs [first, end), which lie behind the ranges that are there.
  void add(int64_t first, int64_t end) {
    const Panels panels{first / kPanelRows, (end + kPanelRows - 1) / kPanelRows};
    if (count > 0 && panels.first < at[count - 1].end) {
      at[count - 1].end = std::max(at[count - 1].end, panels.end);
    } else {
      at[count++] = panels;
    }
  }
};

inline Panels share_of(int64_t panels, int32_t rank, int32_t size) {
  return {panels * rank / size, panels * (rank + 1) / size};
}

// Of all panels, of `total` of them, or of one rank's.
inline PanelRanges own_panels(int64_t total, const Ranks& ranks) {
  return {{share_of(total, ranks.rank, ranks.size)}, 1};
}

// Outputs of a panel, which of a gate-up pair are half of its rows.
inline int64_t panel_outputs(const Linear& w) { return w.gate_up ? kPanelRows / 2 : kPanelRows; }

// Some panels of a matrix as one of their own. Its bias and what else belongs to rows are those of the whole matrix,
// where the results are finished.
inline Linear part_of(const Linear& w, const Panels& panels) {
  Linear part = w;
  const int64_t lane = panels.first * kPanelRows;
  part.n = std::min(w.n, panels.end * kPanelRows) - std::min(w.n, lane);
  part.starts += panels.first;
  if (part.scales != nullptr) part.scales += lane;
  if (part.sums != nullptr) part.sums += lane;
  if (part.bias != nullptr) part.bias += lane;
  return part;
}

// Completes results of `outputs` values a row, of which every rank has those of its share of `panels`. Throws RankLost.
inline void gather_outputs(const Ranks& ranks, void* data, int64_t rows, int64_t outputs, int64_t panels,
                           int64_t outputs_of_panel, int64_t value_bytes) {
  if (ranks.size == 1) return;
  int64_t starts[kMostRanks + 1];
  for (int32_t rank = 0; rank <= ranks.size; ++rank) {
    starts[rank] = std::min(outputs, panels * rank / ranks.size * outputs_of_panel) * value_bytes;
  }
  if (ranks.gather(ranks.self, static_cast<char*>(data), rows, outputs * value_bytes, starts) != 0) throw RankLost{};
}

}  // namespace quire
