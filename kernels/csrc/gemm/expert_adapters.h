// What adapters add to one of the two products of a block of experts: B (A x) of each expert's own.
//
// Promises: a pair of a row and an expert gets what it gets alone; what is computed is valid until the next one is
// made. Must not know: how the products are computed, layers.
#pragma once

#include <cstdint>

#include "gemm/expert_pairs.h"
#include "gemm/low_rank.h"
#include "runtime/context.h"
#include "weights/linear.h"

namespace quire {

class ExpertAdapters {
 public:
  // Of rows `from` [.., w.columns] that multiply one matrix of every expert, as `w` has it. `chosen`: which of them
  // each pair multiplies: its order divided by it; 0: a row of its own. Throws std::bad_alloc. Make it while no other
  // op runs.
  ExpertAdapters(Context& context, const StepAdapters& step, int64_t site, const PairOrder& pairs, int64_t top_k,
                 const Linear& w, const bf16* from, int64_t chosen);

  // Of the pairs of the expert at this place in the order of those that have rows; null: none of them gets anything.
  const Addend* of(int64_t hit) const { return addends_[hit].groups.count > 0 ? &addends_[hit] : nullptr; }
  // Of `run`, whose worker has to wait for them; 0: no pair gets anything.
  int64_t items() const { return items_; }

  // By every worker: what is left, from the pool's `third` pieces.
  void run(int worker) const;

 private:
  Pool& pool_;
  const Fetch fetch_;
  const PairOrder& pairs_;
  const bf16* const from_;
  const int64_t chosen_, k_, columns_;
  int64_t width_ = 0, chunks_ = 0, items_ = 0;
  Addend* addends_ = nullptr;       // [hit]
  int64_t* first_items_ = nullptr;  // [hit + 1]
  float* shrunk_ = nullptr;         // [pairs, width]
  bf16* filled_ = nullptr;          // of each worker the rows of a group, with zeros past the columns; null: none are
};

}  // namespace quire
