// Projections with what surrounds them, each in one run of the pool: norm, quantise, multiply, epilogue.
//
// Owns where prepared rows live. Promises: a row's result does not depend on who prepared it. Must not know: layers.
#include <algorithm>

#include "gemm/division.h"
#include "gemm/gemm.h"
#include "gemm/gemm_rows.h"
#include "gemm/products.h"
#include "gemm/shrinking.h"
#include "ops.h"
#include "runtime/context.h"
#include "weights/kinds.h"

namespace quire {
namespace {

// Few values are prepared by every worker for itself, sooner than by each a part and a wait for the others.
constexpr int64_t kRedundantValues = 4096;
constexpr int64_t kPreparedTogether = 8;  // rows: short enough to be dealt evenly

struct Input {
  const bf16* data;  // [m, columns]
  int64_t m;
  const Norm* norm;                      // of the columns, or null: none
  const Shrinking* shrinking = nullptr;  // what adapters need of the rows, or null: nothing
};

template <typename Kind>
int64_t rows_bytes(const Linear& w, int64_t m) {
  return aligned(placed_bytes<Kind>(w, m)) + aligned(m * 4) + aligned(m * sums_per_row<Kind>(w) * 4);
}

// Prepared rows: data, scales and group sums, one after the other.
template <typename Kind>
struct Prepared {
  Prepared(const Linear& w, int64_t m, char* memory)
      : data(memory),
        scales(reinterpret_cast<float*>(memory + aligned(placed_bytes<Kind>(w, m)))),
        sums(reinterpret_cast<int32_t*>(reinterpret_cast<char*>(scales) + aligned(m * 4))) {}
  char* data;
  float* scales;
  int32_t* sums;
};

// `normed` [columns] and `whole` [k] are the worker's own.
template <typename Kind>
void prepare_row(const Linear& w, const Input& in, int64_t row, const Prepared<Kind>& to, bf16* normed, char* whole) {
  const bool apart = lies_apart<Kind>(w, in.m);
  char* data = apart ? whole : to.data + row * row_bytes<Kind>(w);
  const RawRow raw{in.data + row * w.columns, in.norm, w.columns};
  Kind::prepare(w, raw, normed, data, to.scales + row, to.sums + row * sums_per_row<Kind>(w));
  if (apart) take_apart<Kind>(w, in.m, row, whole, to.data);
}

// Bytes of all prepared rows, and of a worker's own memory.
struct Memory {
  int64_t prepared, own;
};

// prepare(row, memory, own) for all rows of k values, then multiply(worker, memory, own) by every worker. Between both
// what adapters need.
template <typename Prepare, typename Multiply>
void run_prepared(Context& context, const Input& in, int64_t k, const Memory& sizes, const Prepare& prepare,
                  const Multiply& multiply) {
  Pool& pool = context.pool;
  const int64_t m = in.m;
  const Shrinking* shrinking = in.shrinking;
  const bool redundant = shrinking == nullptr && m * k <= kRedundantValues;
  if (!redundant) context.shared.reserve(static_cast<size_t>(sizes.prepared));
  context.reserve_own(static_cast<size_t>(sizes.own + (redundant ? sizes.prepared : 0)));
  pool.run([&](int worker) {
    char* own = context.own[static_cast<size_t>(worker)].data();
    char* memory = redundant ? own + sizes.own : context.shared.data();
    if (redundant) {
      for (int64_t row = 0; row < m; ++row) prepare(row, memory, own);
    } else {
      Piece rows;
      while (pool.first.take(worker, m, kPreparedTogether, &rows)) {
        for (int64_t row = rows.begin; row < rows.end; ++row) {
          prepare(row, memory, own);
          if (shrinking != nullptr) shrinking->prepare(row);
        }
        pool.first.finish(rows.end - rows.begin);
      }
      pool.first.wait(worker, m);
    }
    if (shrinking != nullptr) shrinking->run(worker);
    multiply(worker, memory, own);
  });
}

// Of `count` findings that lie `stride` apart.
Best best_of(const Best* found, int64_t count, int64_t stride) {
  Best first{0.0f, -1, true};
  for (int64_t i = 0; i < count; ++i) {
    const Best& one = found[i * stride];
    first.finite = first.finite && one.finite;
    const bool wins =
        first.column < 0 || one.value > first.value || (one.value == first.value && one.column < first.column);
    if (one.column >= 0 && wins) {
      first.value = one.value;
      first.column = one.column;
    }
  }
  return first;
}

// Calls multiply(out) with what is the worker's own.
template <typename Multiply>
void with_own(const Context& context, const Input& in, Output out, int worker, const Multiply& multiply) {
  if (out.best != nullptr) out.best += worker * in.m;
  if (in.shrinking == nullptr) return multiply(out);
  Expander expander(in.shrinking->addend(), context.pool.third, in.shrinking->items(), worker);
  out.expander = &expander;
  multiply(out);
}

// The panels of a matrix that are in `ranges`, by every worker.
void multiply_panels(Context& context, int worker, const Linear& w, const PanelRanges& ranges, const Rows& rows,
                     Output out, char* own) {
  Pieces& pieces = context.pool.second;
  out.whole = &w;
  if (ranges.count == 1) {
    out.first_panel = ranges.at[0].first;
    Deal deal(pieces, context.fetch);
    return gemm_worker(deal, worker, part_of(w, ranges.at[0]), rows, out, own);
  }
  PanelQueue queue{pieces, ranges.total()};
  while (queue.fetch(worker)) {
    int64_t before = 0;
    const Panels* range = ranges.at;
    for (; queue.held.begin >= before + range->count(); ++range) before += range->count();
    out.first_panel = range->first;
    Deal deal(queue, before, range->count(), context.fetch);
    gemm_worker(deal, worker, part_of(w, *range), rows, out, own);
  }
}

template <typename Kind>
void project_as(Context& context, const Linear& w, const Input& in, const Output& out, const PanelRanges& ranges) {
  if (in.m == 0) return;
  Pool& pool = context.pool;
  const int64_t sums_bytes = aligned(gemm_scratch_bytes(w, in.m));
  const int64_t whole_bytes = aligned(w.k * 2);
  const bool as_is = Kind::kTakesRowsAsIs && !takes_tiles<Kind>(w, in.m) && in.norm == nullptr && w.k == w.columns;
  if (as_is) {
    context.reserve_own(static_cast<size_t>(sums_bytes));
    return pool.run([&](int worker) {
      char* own = context.own[static_cast<size_t>(worker)].data();
      if (in.shrinking != nullptr) in.shrinking->run(worker);
      with_own(context, in, out, worker, [&](const Output& to) {
        multiply_panels(context, worker, w, ranges, {in.m, in.data, nullptr, nullptr}, to, own);
      });
    });
  }
  const auto prepare = [&](int64_t row, char* memory, char* own) {
    char* normed = own + sums_bytes;
    prepare_row<Kind>(w, in, row, Prepared<Kind>(w, in.m, memory), reinterpret_cast<bf16*>(normed),
                      normed + whole_bytes);
  };
  const Memory sizes{rows_bytes<Kind>(w, in.m), sums_bytes + 2 * whole_bytes};
  run_prepared(context, in, w.k, sizes, prepare, [&](int worker, char* memory, char* own) {
    const Prepared<Kind> rows(w, in.m, memory);
    with_own(context, in, out, worker, [&](const Output& to) {
      multiply_panels(context, worker, w, ranges, {in.m, rows.data, rows.scales, rows.sums}, to, own);
    });
  });
}

// A matrix whose parts are of several kinds, which all multiply rows of bf16, each with the sums of groups of its own.
void project_stacked(Context& context, const Linear& w, const Input& in, const Output& out, const PanelRanges& ranges) {
  using Kind = StoredWeights<Nibbles>;  // as any
  if (in.m == 0) return;
  const int64_t sums_bytes = aligned(gemm_scratch_bytes(w, in.m));
  int64_t end = aligned(placed_bytes<Kind>(w, in.m));
  int64_t sums_at[kMostParts];
  for (int64_t part = 0; part < w.num_parts; ++part) {
    sums_at[part] = end;
    end += aligned(in.m * sums_per_row<Kind>(w.parts[part]) * 4);
  }
  const auto sums_of = [&](char* memory, int64_t part) { return reinterpret_cast<float*>(memory + sums_at[part]); };
  const auto prepare = [&](int64_t row, char* memory, char* own) {
    const bool apart = lies_apart<Kind>(w, in.m);
    char* data = apart ? own + sums_bytes : memory + row * row_bytes<Kind>(w);
    Bf16Weights::prepare(w, {in.data + row * w.columns, in.norm, w.columns}, nullptr, data, nullptr, nullptr);
    for (int64_t part = 0; part < w.num_parts; ++part) {
      float* sums = sums_of(memory, part) + row * sums_per_row<Kind>(w.parts[part]);
      Kind::add_up(w.parts[part], reinterpret_cast<const bf16*>(data), sums);
    }
    if (apart) take_apart<Kind>(w, in.m, row, data, memory);
  };
  // What is multiplied: in each range those panels that are of one part.
  struct Run {
    int64_t part, first;  // the first panel in the whole matrix
    Linear multiplied;
    int64_t panels;
  };
  Run runs[kMostParts * PanelRanges::kMost];
  int num_runs = 0;
  for (int64_t part = 0, first = 0; part < w.num_parts; first += panel_count(w.parts[part]), ++part) {
    for (int i = 0; i < ranges.count; ++i) {
      const int64_t begin = std::max(first, ranges.at[i].first);
      const int64_t stop = std::min(first + panel_count(w.parts[part]), ranges.at[i].end);
      if (begin >= stop) continue;
      const Panels own{begin - first, stop - first};
      runs[num_runs++] = {part, begin, part_of(w.parts[part], own), own.count()};
    }
  }
  const Memory sizes{end, sums_bytes + aligned(w.k * 2)};
  run_prepared(context, in, w.k, sizes, prepare, [&](int worker, char* memory, char* own) {
    with_own(context, in, out, worker, [&](Output to) {
      to.whole = &w;
      PanelQueue queue{context.pool.second, ranges.total()};
      while (queue.fetch(worker)) {
        int64_t before = 0;
        const Run* run = runs;
        for (; queue.held.begin >= before + run->panels; ++run) before += run->panels;
        to.first_panel = run->first;
        Deal deal(queue, before, run->panels, context.fetch);
        const auto* sums = reinterpret_cast<const int32_t*>(sums_of(memory, run->part));
        gemm_worker(deal, worker, run->multiplied, {in.m, memory, nullptr, sums}, to, own);
      }
    });
  });
}

void project(Context& context, const Linear& w, const Input& in, const Output& out, const PanelRanges& ranges) {
  if (w.kind == WeightKind::kStacked) return project_stacked(context, w, in, out, ranges);
  with_kind(w.kind, [&](auto kind) { project_as<decltype(kind)>(context, w, in, out, ranges); });
}

// The panels of this rank.
PanelRanges own_panels(const Context& context, const Linear& w) { return own_panels(panel_count(w), context.ranks); }

void gather(const Context& context, const Linear& w, void* out, int64_t m, int64_t value_bytes) {
  const int64_t outputs = w.gate_up ? w.n / 2 : w.n;
  gather_outputs(context.ranks, out, m, outputs, panel_count(w), panel_outputs(w), value_bytes);
}

void project_adapted(Context& context, const Linear& w, Input in, const Output& out, const StepAdapters* adapters,
                     int64_t site, const PanelRanges& ranges) {
  if (adapters == nullptr) return project(context, w, in, out, ranges);
  const Shrinking shrinking(context, *adapters, site, w, in.data, in.m, in.norm);
  if (shrinking.any()) in.shrinking = &shrinking;
  project(context, w, in, out, ranges);
}

}  // namespace

int32_t norm_linear_panels(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm, void* out,
                           Epilogue epilogue, const StepAdapters* adapters, int64_t site, const PanelRanges& ranges) {
  return guarded(context, [&] {
    const Output to{epilogue, out, w->gate_up ? w->n / 2 : w->n, nullptr};
    project_adapted(*context, *w, {x, m, norm}, to, adapters, site, ranges);
  });
}

int32_t norm_linear_alone(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm, void* out,
                          Epilogue epilogue) {
  const PanelRanges all{{{0, panel_count(*w)}}, 1};
  return norm_linear_panels(context, w, x, m, norm, out, epilogue, nullptr, -1, all);
}

QUIRE_API int32_t quire_norm_linear(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm,
                                    void* out, Epilogue epilogue, const StepAdapters* adapters, int64_t site) {
  const PanelRanges own = own_panels(*context, *w);
  const int32_t failed = norm_linear_panels(context, w, x, m, norm, out, epilogue, adapters, site, own);
  if (failed != 0) return failed;
  return guarded(context, [&] { gather(*context, *w, out, m, epilogue == Epilogue::kStoreFloat ? 4 : 2); });
}

QUIRE_API int32_t quire_linear_add(Context* context, const Linear* w, const bf16* x, int64_t m, float scale,
                                   const bf16* residual, bf16* out, const StepAdapters* adapters, int64_t site) {
  return guarded(context, [&] {
    Output to{Epilogue::kAdd, out, w->n, residual};
    to.scale = scale;
    project_adapted(*context, *w, {x, m, nullptr}, to, adapters, site, own_panels(*context, *w));
    gather(*context, *w, out, m, sizeof(bf16));
  });
}

QUIRE_API int32_t quire_norm_add(Context* context, const bf16* y, int64_t m, int64_t columns, const Norm* norm,
                                 float scale, bf16* residual) {
  return guarded(context, [&] {
    context->pool.run([&](int worker) {
      Piece rows;
      while (context->pool.first.take(worker, m, kPreparedTogether, &rows)) {
        for (int64_t row = rows.begin; row < rows.end; ++row) {
          norm_add_row(y + row * columns, *norm, columns, scale, residual + row * columns);
        }
      }
    });
  });
}

QUIRE_API int32_t quire_mul_sigmoid(Context* context, const bf16* gate, int64_t m, int64_t columns, bf16* x) {
  return guarded(context, [&] {
    context->pool.run([&](int worker) {
      Piece rows;
      while (context->pool.first.take(worker, m, kPreparedTogether, &rows)) {
        for (int64_t row = rows.begin; row < rows.end; ++row) {
          mul_sigmoid_row(gate + row * columns, columns, x + row * columns);
        }
      }
    });
  });
}

QUIRE_API int32_t quire_greedy(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm,
                               const uint64_t* allowed, int64_t* columns, uint8_t* finite) {
  return guarded(context, [&] {
    const int64_t workers = context->pool.size();
    const Ranks& ranks = context->ranks;
    context->between.reserve(static_cast<size_t>((workers + ranks.size) * m) * sizeof(Best));
    Best* best = reinterpret_cast<Best*>(context->between.data());
    std::fill(best, best + workers * m, Best{0.0f, -1, true});
    const PanelRanges own = own_panels(*context, *w);
    project(*context, *w, {x, m, norm}, {Epilogue::kBest, nullptr, 0, nullptr, best, allowed}, own);
    Best* of_ranks = best + workers * m;
    for (int64_t row = 0; row < m; ++row) of_ranks[ranks.rank * m + row] = best_of(best + row, workers, m);
    const int64_t panels = ranks.size;  // each rank's as one
    gather_outputs(ranks, of_ranks, 1, ranks.size * m, panels, m, sizeof(Best));
    for (int64_t row = 0; row < m; ++row) {
      const Best first = best_of(of_ranks + row, ranks.size, m);
      columns[row] = first.column;
      finite[row] = first.finite;
    }
  });
}

}  // namespace quire
