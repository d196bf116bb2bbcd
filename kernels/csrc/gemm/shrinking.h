// The first half of what adapters add, the scaled A x of a product's rows, within the run of the pool that multiplies.
//
// Promises: what it computes is valid until the next one is made. Must not know: the product.
#pragma once

#include "gemm/low_rank.h"
#include "gemm/norm.h"
#include "runtime/context.h"

namespace quire {

constexpr int64_t kItemRanks = 16;  // of A x, dealt at once

// The groups of the m rows of an addend, in memory that they point to. `num_windows` is known.
void group_rows(const Addend& addend, int64_t m, RowGroups* groups);

// out[i][rank] = the scaled A x of the `number` rows of a group, of ranks [first, first + kItemRanks) or as many as
// there are. k is a multiple of 32. `after`: what will be read after this.
void shrink_group(const LowRank& a, int64_t k, const bf16* const (&rows)[kGroupRows], float* const (&out)[kGroupRows],
                  int64_t number, int64_t first, const bf16* after, Fetch fetch);

class Shrinking {
 public:
  // Of rows x [m, columns], after the norm if there is one. Throws std::bad_alloc. Make it while no other op runs.
  Shrinking(Context& context, const StepAdapters& adapters, int64_t site, const Linear& w, const bf16* x, int64_t m,
            const Norm* norm);

  // Whether any row gets anything.
  bool any() const { return addend_.groups.count > 0; }
  const Addend& addend() const { return addend_; }
  // Of `run`, whose worker has to wait for them.
  int64_t items() const { return addend_.groups.count * chunks_; }

  // Before `run` begins, each row once.
  void prepare(int64_t row) const {
    if (prepared_ != nullptr && addend_.of(row) != nullptr) prepare_row(row);
  }
  // By every worker: what is left, from the pool's `third` pieces.
  void run(int worker) const;

 private:
  void prepare_row(int64_t row) const;

  Pool& pool_;
  const Fetch fetch_;
  const Linear& w_;
  const bf16* const x_;
  const Norm* const norm_;
  Addend addend_;
  float* shrunk_ = nullptr;
  bf16* prepared_ = nullptr;  // [m, k]; null: rows are taken as they are
  int64_t chunks_ = 0;        // of ranks
};

}  // namespace quire
