// The second half of what adapters add: B of the A x of each row, in groups of rows that have the same adapter.
//
// Promises: a row alone; groups share nothing but loads. Must not know: what the sums are added to.
#include "gemm/low_rank.h"

#include <algorithm>

#include "simd/unroll.h"

namespace quire {
namespace {

// to[row][0, 32) = the sum over j of h[row][j] b[j][0, 32) of `kRows` rows.
template <int kRows>
void expand_half(const bf16* b, int32_t count, const float* const (&h)[kGroupRows], float* const (&to)[kGroupRows]) {
  Vec sums[kRows][kHalfVecs];
  unrolled<kRows>([&](auto row) { unrolled<kHalfVecs>([&](auto v) { sums[row][v] = vzero(); }); });
  for (int32_t j = 0; j < count; ++j, b += kHalfRows) {
    Vec values[kHalfVecs];
    unrolled<kHalfVecs>([&](auto v) { values[v] = vload_bf16(b + v * kLanes); });
    unrolled<kRows>([&](auto row) {
      const Vec factor = vset(h[row][j]);
      unrolled<kHalfVecs>([&](auto v) { sums[row][v] = vfma(factor, values[v], sums[row][v]); });
    });
  }
  unrolled<kRows>([&](auto row) { unrolled<kHalfVecs>([&](auto v) { vstore(to[row] + v * kLanes, sums[row][v]); }); });
}

}  // namespace

void Expander::expand(int64_t window, int64_t panel) {
  if (!ready_) shrinking_.wait(worker_, items_);
  ready_ = true;
  const RowGroups& groups = addend_.groups;
  if (window != window_) {
    std::fill(gets_some_, gets_some_ + kWindowRows, false);
    const int32_t end = groups.starts[groups.windows[window + 1]];
    for (int32_t i = groups.starts[groups.windows[window]]; i < end; ++i) {
      gets_some_[groups.order[i] % kWindowRows] = true;
    }
  }
  panel_ = panel;
  window_ = window;
  for (int32_t group = groups.windows[window]; group < groups.windows[window + 1]; ++group) {
    const int32_t begin = groups.starts[group], end = groups.starts[group + 1];
    const LowRank& a = *addend_.of(groups.order[begin]);
    for (int half = 0; half < 2; ++half) {
      const HalfRanks& ranks = a.halves[2 * panel + half];
      const bf16* b = a.expand + ranks.start;
      if (!fetched_beside_) {  // what the worker's next panel needs is on its way while that panel is multiplied
        for (int32_t j = 0; j < ranks.count; ++j) __builtin_prefetch(b + (2 * ranks.count + j) * kHalfRows);
      }
      const float* h[kGroupRows];
      float* to[kGroupRows];
      for (int i = 0; i < kGroupRows; ++i) {
        const int64_t row = groups.order[std::min(begin + i, end - 1)];
        h[i] = addend_.shrunk + row * addend_.width + ranks.first;
        to[i] = values_[row % kWindowRows] + half * kHalfRows;
      }
      with_count<kGroupRows>(end - begin, [&](auto number) { expand_half<number>(b, ranks.count, h, to); });
    }
  }
}

Beside Expander::needed(int64_t panel) {
  const RowGroups& groups = addend_.groups;
  int64_t count = 0;
  const LowRank* last = nullptr;
  for (int32_t group = groups.windows[0]; group < groups.windows[1]; ++group) {
    const LowRank& a = *addend_.of(groups.order[groups.starts[group]]);
    if (&a == last) continue;
    last = &a;
    const HalfRanks* halves = a.halves + 2 * panel;
    const char* line = reinterpret_cast<const char*>(a.expand + halves[0].start);
    const int64_t both = std::min<int64_t>(halves[0].count + halves[1].count, kMostLines - count);
    for (int64_t j = 0; j < both; ++j) lines_[count++] = line + j * 64;
    __builtin_prefetch(halves + 4);  // for the next call
  }
  fetched_beside_ = true;
  return {lines_, count};
}

}  // namespace quire
