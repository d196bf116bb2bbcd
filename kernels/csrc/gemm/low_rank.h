// What adapters add to a product: B (A x) of the rows that have one, a matrix of few rows and one of few columns.
//
// Owns the layout of both. Promises: a row's sums are walked in one order, whatever the other rows and their adapters
// are; a row without an adapter is not touched. Must not know: kinds of weights, layers.
#pragma once

#include <cstdint>

#include "runtime/pool.h"
#include "simd/prefetch.h"
#include "simd/simd.h"
#include "weights/linear.h"

namespace quire {

constexpr int kHalfRows = kPanelRows / 2;  // of a panel; of a gate-up pair a half is gate or up
constexpr int kHalfVecs = kHalfRows / kLanes;

// The ranks [first, first + count) that a half of a panel has: those of the parts that its rows are of.
struct HalfRanks {
  int64_t start;  // where its values begin in `expand`
  int32_t first;
  int32_t count;
};

// Of one matrix.
struct LowRank {
  int64_t rank;         // of all parts together; 0: nothing is added
  const bf16* shrink;   // A: [rank, k], zeros past the columns
  const float* scales;  // [rank]
  const bf16* expand;   // B: of each half [count][32], one half behind the other
  const HalfRanks* halves;
  int64_t per_expert;  // values of `expand`; 0: it is of one matrix, else of every expert's, one behind the other

  // Of one expert's matrix of `k` columns.
  LowRank of_expert(int64_t expert, int64_t k) const {
    return {rank, shrink + expert * rank * k, scales + expert * rank, expand + expert * per_expert, halves, 0};
  }
};

// The adapters of a step's rows.
struct StepAdapters {
  const int32_t* slots;            // [rows]; -1: none
  const LowRank* const* adapters;  // [count], of each one its matrices by site
  int64_t count;
};

constexpr int kGroupRows = kRegisters >= 32 ? 4 : 1;  // that share loads of A and of B
constexpr int64_t kWindowRows = 48;                   // whose addends in a panel are computed at once

// The rows that have an adapter, in groups of up to kGroupRows that have the same one, each within a window: a group's
// are [starts[i], starts[i + 1]) of `order`.
struct RowGroups {
  int32_t* order;    // [rows]
  int32_t* starts;   // [rows + 1]
  int32_t* windows;  // [num_windows + 1]: the first group of each
  int64_t count, num_windows;
};

// Of the rows of one product.
struct Addend {
  const StepAdapters* step;
  int64_t site;
  RowGroups groups;
  const float* shrunk;  // [rows, width]: the scaled A x of the rows that have some
  int64_t width;

  const LowRank& at(int64_t slot) const { return step->adapters[slot][site]; }
  const LowRank* of(int64_t row) const {
    const int32_t slot = step->slots[row];
    return slot < 0 || at(slot).rank == 0 ? nullptr : &at(slot);
  }
};

// What one worker adds to the panels that it finishes: all rows of a window at once, so that rows of one adapter share
// the loads of its values.
class Expander {
 public:
  // `shrinking` deals the `items` that must be finished before A x is read.
  Expander(const Addend& addend, const Pieces& shrinking, int64_t items, int worker)
      : addend_(addend), shrinking_(shrinking), items_(items), worker_(worker) {}
  Expander(const Expander&) = delete;
  Expander& operator=(const Expander&) = delete;

  // What a row gets in a panel, [kPanelRows]; null: nothing, not even zeros. Valid until the next call.
  const float* of(int64_t row, int64_t panel) {
    if (panel != panel_ || row / kWindowRows != window_) expand(row / kWindowRows, panel);
    return gets_some_[row % kWindowRows] ? values_[row % kWindowRows] : nullptr;
  }

  // What the first rows need in a panel, to be fetched while the one before is multiplied.
  Beside needed(int64_t panel);

 private:
  static constexpr int kMostLines = 1024;

  void expand(int64_t window, int64_t panel);

  const Addend& addend_;
  const Pieces& shrinking_;
  const int64_t items_;
  const int worker_;
  int64_t panel_ = -1, window_ = -1;
  bool ready_ = false, fetched_beside_ = false;
  bool gets_some_[kWindowRows];  // rows of the window
  alignas(64) float values_[kWindowRows][kPanelRows];
  const char* lines_[kMostLines];
};

}  // namespace quire
