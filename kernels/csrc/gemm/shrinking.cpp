#include "gemm/shrinking.h"

#include <algorithm>

#include "simd/unroll.h"

namespace quire {
namespace {

constexpr int kRanksTogether = 4;      // independent sums hide the latency of a product
constexpr int64_t kLine = 2 * kLanes;  // values of 64 bytes

// out[row][rank] of `kRows` rows and up to kRanksTogether ranks. k is a multiple of 32. `next`: what will be read after
// this, as much again.
template <int kRows, bool kToSecond>
void shrink_ranks(const LowRank& a, int64_t k, const bf16* const (&x)[kGroupRows], float* const (&out)[kGroupRows],
                  int64_t first, int64_t count, const bf16* next) {
  Vec sums[kRows][kRanksTogether];
  for (auto& row : sums) {
    for (Vec& sum : row) sum = vzero();
  }
  const bf16* weights[kRanksTogether];
  for (int j = 0; j < kRanksTogether; ++j) {
    weights[j] = a.shrink + (first + std::min<int64_t>(j, count - 1)) * k;  // a rank too many is computed for nothing
  }
  for (int64_t at = 0; at < k; at += kLine) {
    unrolled<kRanksTogether>([&](auto j) { prefetch_line<kToSecond>(next + j * k + at); });
    unrolled<2>([&](auto half) {
      const int64_t from = at + half * kLanes;
      Vec w[kRanksTogether];
      unrolled<kRanksTogether>([&](auto j) { w[j] = vload_bf16(weights[j] + from); });
      unrolled<kRows>([&](auto row) {
        const Vec value = vload_bf16(x[row] + from);
        unrolled<kRanksTogether>([&](auto j) { sums[row][j] = vfma(w[j], value, sums[row][j]); });
      });
    });
  }
  for (int row = 0; row < kRows; ++row) {
    for (int64_t j = 0; j < count; ++j) out[row][first + j] = a.scales[first + j] * lane_sum(sums[row][j]);
  }
}

}  // namespace

void group_rows(const Addend& addend, int64_t m, RowGroups* groups) {
  int32_t end = 0;
  groups->count = 0;
  for (int64_t window = 0; window < groups->num_windows; ++window) {
    groups->windows[window] = static_cast<int32_t>(groups->count);
    const int64_t first = window * kWindowRows, last = std::min(first + kWindowRows, m);
    for (int64_t slot = 0; slot < addend.step->count; ++slot) {
      if (addend.at(slot).rank == 0) continue;
      int in_group = 0;
      for (int64_t row = first; row < last; ++row) {
        if (addend.step->slots[row] != slot) continue;
        if (in_group == 0) groups->starts[groups->count++] = end;
        groups->order[end++] = static_cast<int32_t>(row);
        in_group = (in_group + 1) % kGroupRows;
      }
    }
  }
  groups->windows[groups->num_windows] = static_cast<int32_t>(groups->count);
  groups->starts[groups->count] = end;
}

void shrink_group(const LowRank& a, int64_t k, const bf16* const (&rows)[kGroupRows], float* const (&out)[kGroupRows],
                  int64_t number, int64_t first, const bf16* after, Fetch fetch) {
  const int64_t last = std::min(first + kItemRanks, a.rank);
  for (int64_t at = first; at < last; at += kRanksTogether) {
    const int64_t count = std::min<int64_t>(kRanksTogether, a.rank - at);
    const bf16* next = at + kRanksTogether < last ? a.shrink + (at + kRanksTogether) * k : after;
    with_count<kGroupRows>(static_cast<int>(number), [&](auto rows_of_group) {
      with_fetch(fetch, [&](auto second) { shrink_ranks<rows_of_group, second>(a, k, rows, out, at, count, next); });
    });
  }
}

Shrinking::Shrinking(Context& context, const StepAdapters& adapters, int64_t site, const Linear& w, const bf16* x,
                     int64_t m, const Norm* norm)
    : pool_(context.pool), fetch_(context.fetch), w_(w), x_(x), norm_(norm), addend_{&adapters, site, {}, nullptr, 0} {
  for (int64_t slot = 0; slot < adapters.count; ++slot) addend_.width = std::max(addend_.width, addend_.at(slot).rank);
  if (addend_.width == 0 || m == 0) return;
  const bool as_is = norm == nullptr && w.k == w.columns;
  const int64_t windows = (m + kWindowRows - 1) / kWindowRows;
  const int64_t shrunk_bytes = aligned(m * addend_.width * 4), order_bytes = aligned(m * 4);
  const int64_t starts_bytes = aligned((m + 1) * 4), windows_bytes = aligned((windows + 1) * 4);
  const int64_t rows_bytes = as_is ? 0 : aligned(m * w.k * 2);
  context.adapted.reserve(static_cast<size_t>(shrunk_bytes + order_bytes + starts_bytes + windows_bytes + rows_bytes));
  char* memory = context.adapted.data();
  const auto place = [&](int64_t bytes) {
    char* const at = memory;
    memory += bytes;
    return at;
  };
  shrunk_ = reinterpret_cast<float*>(place(shrunk_bytes));
  RowGroups& groups = addend_.groups;
  groups.order = reinterpret_cast<int32_t*>(place(order_bytes));
  groups.starts = reinterpret_cast<int32_t*>(place(starts_bytes));
  groups.windows = reinterpret_cast<int32_t*>(place(windows_bytes));
  groups.num_windows = windows;
  if (!as_is) prepared_ = reinterpret_cast<bf16*>(memory);
  group_rows(addend_, m, &groups);
  addend_.shrunk = shrunk_;
  chunks_ = (addend_.width + kItemRanks - 1) / kItemRanks;
}

void Shrinking::prepare_row(int64_t row) const {
  bf16* to = prepared_ + row * w_.k;
  const RawRow raw{x_ + row * w_.columns, norm_, w_.columns};
  const bf16* normed = raw.normed(to);
  if (normed != to) std::copy(normed, normed + w_.columns, to);
  std::fill(to + w_.columns, to + w_.k, bf16{0});
}

void Shrinking::run(int worker) const {
  const RowGroups& groups = addend_.groups;
  const int64_t k = w_.k;
  const auto adapter_of = [&](int64_t item) -> const LowRank& {
    return *addend_.of(groups.order[groups.starts[item / chunks_]]);
  };
  Piece piece;
  while (pool_.third.take(worker, items(), 1, &piece)) {
    const int64_t group = piece.begin / chunks_, first = piece.begin % chunks_ * kItemRanks;
    const int32_t begin = groups.starts[group], end = groups.starts[group + 1];
    const LowRank& a = adapter_of(piece.begin);
    const bf16* rows[kGroupRows];
    float* out[kGroupRows];
    for (int i = 0; i < kGroupRows; ++i) {
      const int64_t row = groups.order[std::min(begin + i, end - 1)];
      rows[i] = (prepared_ == nullptr ? x_ : prepared_) + row * k;
      out[i] = shrunk_ + row * addend_.width;
    }
    const bf16* after = a.shrink;
    if (piece.next >= 0) after = adapter_of(piece.next).shrink + piece.next % chunks_ * kItemRanks * k;
    shrink_group(a, k, rows, out, end - begin, first, after, fetch_);
    pool_.third.finish(1);
  }
}

}  // namespace quire
