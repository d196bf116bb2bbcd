// What adapters add to a product: B (A x) of the rows that have one, a matrix of few rows and one of few columns.
//
// Owns the layout of both. Promises: a row's sums are walked in one order, whatever the other rows and their adapters
// are; a row without an adapter is not touched. Must not know: kinds of weights, layers.
#pragma once

#include <cstdint>

#include "simd/simd.h"
#include "simd/unroll.h"
#include "weights/linear.h"

namespace quire {

constexpr int kHalfRows = kPanelRows / 2;  // of a panel; of a gate-up pair a half is gate or up
constexpr int kHalfVecs = kHalfRows / kLanes;

// Of one matrix. Every half of a panel has the ranks [first, first + count) alone, which are those of the parts that
// its rows are of.
struct LowRank {
  int64_t rank;           // of all parts together; 0: nothing is added
  const bf16* shrink;     // A: [rank, k], zeros past the columns
  const float* scales;    // [rank]
  const bf16* expand;     // B: of each half [count][32]
  const int64_t* starts;  // [halves], where a half's values begin in `expand`
  const int32_t* firsts;  // [halves]
  const int32_t* counts;  // [halves]
};

// The adapters of a step's rows.
struct StepAdapters {
  const int32_t* slots;            // [rows]; -1: none
  const LowRank* const* adapters;  // [count], of each one its matrices by site
  int64_t count;
};

// Of the rows of one product.
struct Addend {
  const StepAdapters* step;
  int64_t site;
  const float* shrunk;  // [rows, width]: the scaled A x of the rows that have some
  int64_t width;

  const LowRank& at(int64_t slot) const { return step->adapters[slot][site]; }
  const LowRank* of(int64_t row) const {
    const int32_t slot = step->slots[row];
    return slot < 0 || at(slot).rank == 0 ? nullptr : &at(slot);
  }
};

// Adds what a row gets in one panel to its values.
inline void add_low_rank(const Addend& addend, int64_t row, int64_t panel, Vec (&value)[kVecs]) {
  const LowRank* added = addend.of(row);
  if (added == nullptr) return;
  for (int half = 0; half < 2; ++half) {
    const int64_t index = 2 * panel + half;
    const int32_t count = added->counts[index];
    const float* h = addend.shrunk + row * addend.width + added->firsts[index];
    const bf16* b = added->expand + added->starts[index];
    // What the worker's next panel needs is on its way while that panel is multiplied.
    for (int32_t j = 0; j < count; ++j) __builtin_prefetch(b + (2 * count + j) * kHalfRows);
    Vec sums[kHalfVecs];
    unrolled<kHalfVecs>([&](auto v) { sums[v] = vzero(); });
    for (int32_t j = 0; j < count; ++j, b += kHalfRows) {
      const Vec factor = vset(h[j]);
      unrolled<kHalfVecs>([&](auto v) { sums[v] = vfma(factor, vload_bf16(b + v * kLanes), sums[v]); });
    }
    Vec* to = value + half * kHalfVecs;
    unrolled<kHalfVecs>([&](auto v) { to[v] = vadd(to[v], sums[v]); });
  }
}

}  // namespace quire
