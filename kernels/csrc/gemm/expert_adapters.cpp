#include "gemm/expert_adapters.h"

#include <algorithm>

#include "gemm/shrinking.h"

namespace quire {

ExpertAdapters::ExpertAdapters(Context& context, const StepAdapters& step, int64_t site, const PairOrder& pairs,
                               int64_t top_k, const Linear& w, const bf16* from, int64_t chosen)
    : pool_(context.pool),
      fetch_(context.fetch),
      pairs_(pairs),
      from_(from),
      chosen_(chosen),
      k_(w.k),
      columns_(w.columns) {
  for (int64_t slot = 0; slot < step.count; ++slot) width_ = std::max(width_, step.adapters[slot][site].rank);
  if (width_ == 0 || pairs.count == 0) return;
  chunks_ = (width_ + kItemRanks - 1) / kItemRanks;
  const int64_t hit = pairs.num_hit;
  Places places;
  const int64_t addends = places.take(hit * static_cast<int64_t>(sizeof(Addend)));
  const int64_t steps = places.take(hit * static_cast<int64_t>(sizeof(StepAdapters)));
  const int64_t matrices = places.take(hit * step.count * static_cast<int64_t>(sizeof(LowRank)));
  const int64_t tables = places.take(hit * step.count * static_cast<int64_t>(sizeof(LowRank*)));
  const int64_t first_items = places.take((hit + 1) * 8), slots = places.take(pairs.count * 4);
  const int64_t order = places.take(pairs.count * 4), starts = places.take((pairs.count + hit) * 4);
  const int64_t windows = places.take((pairs.count / kWindowRows + 2 * hit) * 4);
  const int64_t shrunk = places.take(pairs.count * width_ * 4);
  const int64_t filled = places.take(k_ == columns_ ? 0 : context.pool.size() * kGroupRows * k_ * 2);
  context.adapted.reserve(places.end());
  char* const base = context.adapted.data();
  const auto ints = [&](int64_t at) { return reinterpret_cast<int32_t*>(base + at); };
  addends_ = reinterpret_cast<Addend*>(base + addends);
  first_items_ = reinterpret_cast<int64_t*>(base + first_items);
  shrunk_ = reinterpret_cast<float*>(base + shrunk);
  if (k_ != columns_) filled_ = reinterpret_cast<bf16*>(base + filled);
  int32_t* of_pairs = ints(slots);
  for (int64_t i = 0; i < pairs.count; ++i) of_pairs[i] = step.slots[pairs.order[i] / top_k];
  auto* own = reinterpret_cast<LowRank*>(base + matrices);
  auto* table = reinterpret_cast<const LowRank**>(base + tables);
  RowGroups groups{ints(order), ints(starts), ints(windows), 0, 0};
  for (int64_t i = 0; i < hit; ++i) {
    const int64_t expert = pairs.hit[i], first = pairs.starts[expert], rows = pairs.rows_of(expert);
    for (int64_t slot = 0; slot < step.count; ++slot) {
      own[slot] = step.adapters[slot][site].of_expert(expert, k_);
      table[slot] = own + slot;
    }
    auto* of_expert = reinterpret_cast<StepAdapters*>(base + steps) + i;
    *of_expert = {of_pairs + first, table, step.count};
    groups.num_windows = (rows + kWindowRows - 1) / kWindowRows;
    Addend& addend = addends_[i];
    addend = {of_expert, 0, groups, shrunk_ + first * width_, width_};
    group_rows(addend, rows, &addend.groups);
    first_items_[i] = items_;
    items_ += addend.groups.count * chunks_;
    own += step.count;
    table += step.count;
    groups.order += rows;
    groups.starts += rows + 1;
    groups.windows += groups.num_windows + 1;
  }
  first_items_[hit] = items_;
}

void ExpertAdapters::run(int worker) const {
  Piece piece;
  while (pool_.third.take(worker, items_, 1, &piece)) {
    const int64_t hit =
        std::upper_bound(first_items_, first_items_ + pairs_.num_hit + 1, piece.begin) - first_items_ - 1;
    const Addend& addend = addends_[hit];
    const int64_t first_pair = pairs_.starts[pairs_.hit[hit]], item = piece.begin - first_items_[hit];
    const int64_t group = item / chunks_, first = item % chunks_ * kItemRanks;
    const int32_t begin = addend.groups.starts[group], end = addend.groups.starts[group + 1];
    const LowRank& a = *addend.of(addend.groups.order[begin]);
    const bf16* rows[kGroupRows];
    float* out[kGroupRows];
    for (int i = 0; i < kGroupRows; ++i) {
      const int64_t pair = first_pair + addend.groups.order[std::min(begin + i, end - 1)];
      rows[i] = from_ + (chosen_ == 0 ? pair : pairs_.order[pair] / chosen_) * columns_;
      out[i] = shrunk_ + pair * width_;
      if (filled_ == nullptr) continue;
      bf16* filled = filled_ + (worker * kGroupRows + i) * k_;
      std::copy(rows[i], rows[i] + columns_, filled);
      std::fill(filled + columns_, filled + k_, bf16{0});
      rows[i] = filled;
    }
    shrink_group(a, k_, rows, out, end - begin, first, a.shrink, fetch_);
    pool_.third.finish(1);
  }
}

}  // namespace quire
