// The first half of what adapters add: the scaled A x of each row, in groups of rows that have the same adapter.
//
// Promises: a row alone; groups share nothing but loads. Must not know: what the sums are added to.
#include "gemm/low_rank.h"

#include <algorithm>

#include "gemm/norm.h"
#include "gemm/shrinking.h"
#include "runtime/context.h"

namespace quire {
namespace {

constexpr int kGroupRows = kRegisters >= 32 ? 4 : 1;  // that share loads of A
constexpr int kRanksTogether = 4;                     // independent sums hide the latency of a product
constexpr int64_t kItemRanks = 16;                    // dealt at once

// out[row][rank] of `kRows` rows and up to kRanksTogether ranks. k is a multiple of 32.
template <int kRows>
void shrink_ranks(const LowRank& a, int64_t k, const bf16* const (&x)[kGroupRows], float* const (&out)[kGroupRows],
                  int64_t first, int64_t count) {
  Vec sums[kRows][kRanksTogether];
  for (auto& row : sums) {
    for (Vec& sum : row) sum = vzero();
  }
  const bf16* weights[kRanksTogether];
  for (int j = 0; j < kRanksTogether; ++j) {
    weights[j] = a.shrink + (first + std::min<int64_t>(j, count - 1)) * k;  // a rank too many is computed for nothing
  }
  for (int64_t at = 0; at < k; at += kLanes) {
    Vec w[kRanksTogether];
    unrolled<kRanksTogether>([&](auto j) { w[j] = vload_bf16(weights[j] + at); });
    unrolled<kRows>([&](auto row) {
      const Vec value = vload_bf16(x[row] + at);
      unrolled<kRanksTogether>([&](auto j) { sums[row][j] = vfma(w[j], value, sums[row][j]); });
    });
  }
  for (int row = 0; row < kRows; ++row) {
    for (int64_t j = 0; j < count; ++j) out[row][first + j] = a.scales[first + j] * lane_sum(sums[row][j]);
  }
}

// The rows that have an adapter, by slot: a group's are [starts[i], starts[i + 1]) of `order`.
struct Groups {
  int32_t* order;   // [rows]
  int32_t* starts;  // [rows + 1]
  int64_t count;
};

void group_rows(const Addend& addend, int64_t m, Groups* groups) {
  int32_t end = 0;
  groups->count = 0;
  for (int64_t slot = 0; slot < addend.step->count; ++slot) {
    if (addend.at(slot).rank == 0) continue;
    int in_group = 0;
    for (int64_t row = 0; row < m; ++row) {
      if (addend.step->slots[row] != slot) continue;
      if (in_group == 0) groups->starts[groups->count++] = end;
      groups->order[end++] = static_cast<int32_t>(row);
      in_group = (in_group + 1) % kGroupRows;
    }
  }
  groups->starts[groups->count] = end;
}

}  // namespace

Addend shrunk_rows(Context& context, const StepAdapters& adapters, int64_t site, const Linear& w, const bf16* x,
                   int64_t m, const Norm* norm) {
  Addend addend{&adapters, site, nullptr, 0};
  for (int64_t slot = 0; slot < adapters.count; ++slot) addend.width = std::max(addend.width, addend.at(slot).rank);
  if (addend.width == 0 || m == 0) return addend;
  const bool as_is = norm == nullptr && w.k == w.columns;
  const int64_t order_bytes = aligned(m * 4), starts_bytes = aligned((m + 1) * 4);
  const int64_t shrunk_bytes = aligned(m * addend.width * 4), rows_bytes = as_is ? 0 : aligned(m * w.k * 2);
  context.adapted.reserve(static_cast<size_t>(order_bytes + starts_bytes + shrunk_bytes + rows_bytes));
  char* memory = context.adapted.data();
  float* shrunk = reinterpret_cast<float*>(memory);
  Groups groups{reinterpret_cast<int32_t*>(memory + shrunk_bytes),
                reinterpret_cast<int32_t*>(memory + shrunk_bytes + order_bytes), 0};
  bf16* prepared = reinterpret_cast<bf16*>(memory + shrunk_bytes + order_bytes + starts_bytes);
  group_rows(addend, m, &groups);
  addend.shrunk = shrunk;

  const int64_t chunks = (addend.width + kItemRanks - 1) / kItemRanks;
  Pool& pool = context.pool;
  pool.run([&](int worker) {
    Piece piece;
    if (!as_is) {
      while (pool.first.take(worker, groups.count, 1, &piece)) {
        for (int32_t i = groups.starts[piece.begin]; i < groups.starts[piece.begin + 1]; ++i) {
          const int64_t row = groups.order[i];
          bf16* to = prepared + row * w.k;
          const RawRow raw{x + row * w.columns, norm, w.columns};
          const bf16* normed = raw.normed(to);
          if (normed != to) std::copy(normed, normed + w.columns, to);
          std::fill(to + w.columns, to + w.k, bf16{0});
        }
        pool.first.finish(1);
      }
      pool.first.wait(worker, groups.count);
    }
    while (pool.second.take(worker, groups.count * chunks, 1, &piece)) {
      const int64_t group = piece.begin / chunks, first = piece.begin % chunks * kItemRanks;
      const int32_t begin = groups.starts[group], end = groups.starts[group + 1];
      const LowRank& a = *addend.of(groups.order[begin]);
      const bf16* rows[kGroupRows];
      float* out[kGroupRows];
      for (int i = 0; i < kGroupRows; ++i) {
        const int64_t row = groups.order[std::min(begin + i, end - 1)];
        rows[i] = as_is ? x + row * w.k : prepared + row * w.k;
        out[i] = shrunk + row * addend.width;
      }
      for (int64_t at = first; at < std::min(first + kItemRanks, a.rank); at += kRanksTogether) {
        const int64_t count = std::min<int64_t>(kRanksTogether, a.rank - at);
        with_count<kGroupRows>(end - begin, [&](auto number) { shrink_ranks<number>(a, w.k, rows, out, at, count); });
      }
    }
  });
  return addend;
}

}  // namespace quire
